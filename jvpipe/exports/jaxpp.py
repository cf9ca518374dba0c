"""Defines the format of JaxPP: a Python file with four tables, and code that passes them to JaxPP.

    MICROBATCHES    the number of micro-batches of a step
    MARKS           the name of the last layer of each stage
    DEVICES         the device of each stage
    ORDER           the tasks of each device; 1F0 is the forward of stage 1 on micro-batch 0

The reader only parses the file, and does not run its code.
"""

import ast
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from jvpipe.exports.format import Format, lists_by_device, ranks_of, with_lists
from jvpipe.exports.torch_csv import RULES, with_sends
from jvpipe.ir.kinds import Kind
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, text
from jvpipe.schedules.halves import merged
from jvpipe.util.brief import brief

_CODE = '''

@dataclasses.dataclass(frozen=True)
class Planned(jaxpp.BaseSchedule):
    """The order of tasks, device by device."""

    def __post_init__(self):
        super().__post_init__()
        split = any("I" in line for line in ORDER)
        object.__setattr__(self, "is_partial_bwd", split)

    def get_mpmd_idx(self, stage_id):
        return DEVICES[stage_id]

    def tasks(self, n_mubatches):
        assert n_mubatches == MICROBATCHES
        return [[_task(word) for word in line.split()] for line in ORDER]


def _task(word):
    stage, kind, microbatch = re.fullmatch(r"(\\d+)([FBIW])(\\d+)", word).groups()
    kinds = {"F": TaskType.FWD, "B": TaskType.BWD, "I": TaskType.BWD_I, "W": TaskType.BWD_W}
    return Task.make(int(stage), int(microbatch), kinds[kind])


def mark(value, after):
    """Call it with what each layer returns, and the layer's name."""
    return jaxpp.mark_stage_end(value) if after in MARKS else value


SCHEDULE = Planned(num_stages=len(MARKS))
'''
_HEAD = (
    "import dataclasses\nimport re\n\nimport jaxpp.api as jaxpp\nfrom jaxpp.schedules import "
    "Task\nfrom jaxpp.types import TaskType\n\n"
)


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the tables, followed by the code that passes them to JaxPP."""
    names = [layer.name for layer in outline.layers]
    marks = [names[end - 1] for end in accumulate(plan.cuts)]
    lists = lists_by_device(plan, outline.microbatches)
    kinds = {task.kind for tasks in lists for task in tasks}
    if kinds & {Kind.I, Kind.W}:
        lists = tuple(_in_halves(tasks) for tasks in lists)
    tables = {
        "MICROBATCHES": outline.microbatches,
        "MARKS": marks,
        "DEVICES": [line for _, line in sorted(ranks_of(lists).items())],
        "ORDER": [text(tasks) for tasks in lists],
    }
    body = "".join(f"{name} = {value!r}\n" for name, value in tables.items())
    return _HEAD + body + _CODE


def _in_halves(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Splits every backward of a list into its halves I and W: JaxPP requires all or no splits.

    JaxPP also requires each W of stage 0 to be directly after its I, so the W is moved there.
    """
    parts = list[Task]()
    for task in tasks:
        on_first_stage = task.stage == 0
        is_whole = task.kind == Kind.B or (task.kind == Kind.I and on_first_stage)
        if is_whole:
            parts += [task._replace(kind=Kind.I), task._replace(kind=Kind.W)]
        elif task.kind != Kind.W or not on_first_stage:
            parts.append(task)
    return tuple(parts)


def _read(text: str, outline: Outline) -> Plan:
    """Reads a plan from the tables.

    Raises:
        ValueError: the tables do not fit the model, or tasks wait for each other.
    """
    tables = _tables(text)
    marks = tables["MARKS"]
    devices = tables["DEVICES"]
    order = tables["ORDER"]
    names = [layer.name for layer in outline.layers]
    if unknown := [mark for mark in marks if mark not in names]:
        raise ValueError(f"the mark {brief(unknown[0])} names no layer of the model")
    # Each mark ends a stage after the marked layer, so the ends must be in rising order.
    ends = [0, *(1 + names.index(mark) for mark in marks)]
    if ends[-1] != len(names) or sorted(set(ends)) != ends:
        raise ValueError(f"the marks must go up to the last layer, '{names[-1]}', in order")
    counts = [b - a for a, b in pairwise(ends)]
    lists = tuple(tuple(map(Task.parse, line.split())) for line in order)
    if not lists or not all(lists):
        raise ValueError(
            f"ORDER, {len(lists)} lines, has a device without tasks: write one for each"
        )
    if (rank := ranks_of(lists)) != dict(enumerate(devices)):
        raise ValueError(
            f"DEVICES are {devices}, but by ORDER the stages run on {sorted(rank.items())}"
        )
    with_sends(lists)  # raises ValueError if tasks wait for each other
    return with_lists(
        Plan.from_cuts(counts, devices, outline=outline),
        merged(lists),
        RULES,
    )


def _tables(text: str) -> dict[str, list[Any]]:
    """Returns the tables that are lists, by name; raises ValueError if a table is missing."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"this is not Python: {getattr(error, 'msg', 'it nests too deeply')}"
        ) from None
    tables = dict[str, list[Any]]()
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        if not isinstance(node.targets[0], ast.Name):
            continue
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, MemoryError, RecursionError):
            continue  # not a literal, such as SCHEDULE
        if isinstance(value, list):
            tables[node.targets[0].id] = value
    kinds = {"MARKS": str, "DEVICES": int, "ORDER": str}
    for name, kind in kinds.items():
        entries = tables.get(name)
        if entries is None or not all(isinstance(entry, kind) for entry in entries):
            raise ValueError(f"the file lacks {name}, a literal list of {kind.__name__}")
    return tables


JAXPP = Format("jaxpp", _write, _read)
