"""torch.distributed.pipelining: the CSV of a schedule with its sends (`compute_comms`),
a line for each rank.

    0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD      rank 0: RECV_B receives what rank 1 sends back
    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD      rank 1

A RECV is written when its SEND is, behind all that its rank has been given so far. Every rank thus
meets its sends and receives in one common order, so no two ranks can wait for each other.
REDUCE_GRAD, behind the last backward of a stage, divides its gradients by the number of
micro-batches: torch adds this to schedules of its own, but nothing to a file that has sends. The
file holds the order of tasks and nothing else; the layers of a stage are those of the module that
torch is given.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable

from jvpipe.exports.format import (
    Format,
    PlanPart,
    by_device,
    lists_for,
    ranks_of,
    with_lists,
)
from jvpipe.ir.kinds import Kind
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists, cannot_progress

_ADDS = (Kind.B, Kind.W)
"""The kinds of tasks that add to the gradients of weights."""
RULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")
_CELL = re.compile(
    r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|\d+(UNSHARD|RESHARD|REDUCE_GRAD)"
)
_SENDS = re.compile("SEND|RECV")


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the task lists of a plan with their sends, rank by rank."""
    lists = by_device(plan, lists_for(plan, outline.microbatches))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(with_sends(lists))
    return out.getvalue()


def with_sends(lists: TaskLists) -> list[list[str]]:
    """Adds SEND, RECV and REDUCE_GRAD to task lists.

    The lists are played: in each round every rank runs its next task, if that is ready.

    Args:
        lists: of each rank.

    Returns:
        The cells of each rank.

    Raises:
        ValueError: tasks wait for each other.
    """
    rank: dict[int, int] = {}
    for r, tasks in enumerate(lists):
        rank.update((task.stage, r) for task in tasks)
    last = max(rank, default=0)
    rows: list[list[str]] = [[] for _ in lists]
    done = set[Task]()
    at = [0] * len(lists)  # the next task of each rank
    # How many tasks of a stage are still to add to its gradients.
    adding = (task for tasks in lists for task in tasks if task.kind in _ADDS)
    backwards = Counter(task.stage for task in adding)
    # Ends: in each round a task runs, or none ever will.
    while any(at[r] < len(tasks) for r, tasks in enumerate(lists)):
        before = sum(at)
        for r, tasks in enumerate(lists):
            if at[r] == len(tasks) or not _ready(tasks[at[r]], done, last):
                continue
            task = tasks[at[r]]
            done.add(task)
            at[r] += 1
            rows[r].append(str(task))
            to = _next_stage(task, last)
            # Stages on one rank hand over their results without a send.
            if to is not None and rank[to] != r:
                letter = "F" if task.kind == Kind.F else "B"
                rows[r].append(f"{task.stage}SEND_{letter}{task.microbatch}")
                rows[rank[to]].append(f"{to}RECV_{letter}{task.microbatch}")
            backwards[task.stage] -= task.kind in _ADDS
            # The gradients of a stage are complete once its last backward, or weight half, has
            # added to them.
            if task.kind in _ADDS and not backwards[task.stage]:
                rows[r].append(f"{task.stage}REDUCE_GRAD")
        if sum(at) == before:  # a round in which nothing ran is followed by others like it
            stuck = [tasks[at[r]] for r, tasks in enumerate(lists) if at[r] < len(tasks)]
            raise cannot_progress({task: _needs(task, last) for task in stuck})
    return rows


def _next_stage(task: Task, last: int) -> int | None:
    """Returns the stage that waits for the result of a task; `last` is the last stage."""
    if task.kind == Kind.F:
        return task.stage + 1 if task.stage < last else None
    sends_back = task.kind in (Kind.B, Kind.I) and task.stage > 0
    return task.stage - 1 if sends_back else None


def _needs(task: Task, last: int) -> list[Task]:
    """Returns the tasks one of which must be done before a task; `last` is the last stage."""
    s, _, m = task
    match task.kind:
        case Kind.F:
            return [Task(s - 1, Kind.F, m)] if s else []
        case Kind.B | Kind.I:
            later = [Task(s + 1, kind, m) for kind in (Kind.B, Kind.I)]
            return later if s < last else [Task(s, Kind.F, m)]
        case Kind.W:
            return [Task(s, Kind.I, m)]
        case _:
            raise ValueError(f"{task} cannot be written: torch knows F, B, I and W")


def _ready(task: Task, done: set[Task], last: int) -> bool:
    """Tells whether a task can run once others are done."""
    needs = _needs(task, last)
    return not needs or not done.isdisjoint(needs)


def _read(text: str, outline: Outline) -> Plan:
    """Reads task lists, with sends or without.

    The file does not say which layers a stage has, so the stages get as many layers each as is
    possible.

    Raises:
        ValueError: the lists or their sends cannot run, or the model has too few layers.
    """
    cells = (map(str.strip, row) for row in csv.reader(io.StringIO(text)))
    rows = [list(filter(None, row)) for row in cells]
    lists = tuple(tuple(_tasks(row)) for row in rows if row)
    if not lists or not all(lists):
        raise ValueError(
            f"the CSV, {len(lists)} rows, has a rank without tasks: write a row for each"
        )
    rank = ranks_of(lists)
    stages = len(rank)
    layers = len(outline.layers)
    if stages > layers:
        raise ValueError(f"the CSV has {stages} stages, the model has {layers} layers")
    sent = with_sends(lists)  # raises ValueError if tasks wait for each other
    if any("_" in cell for row in rows for cell in row):
        _check_sends(rows, sent)
    # The first stages get the layers that are left over.
    counts = [layers // stages + (s < layers % stages) for s in range(stages)]
    devices = [rank[s] for s in range(stages)]
    plan = Plan.from_cuts(counts, devices, outline=outline)
    return with_lists(plan, lists, RULES)


def _tasks(row: Iterable[str]) -> Iterable[Task]:
    """Yields the tasks of a line, without its sends."""
    for cell in row:
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"'{cell}' is not an action of torch's: write 2F0, 2SEND_F0")
        if match[2] and "_" not in match[2]:
            yield Task(int(match[1]), Kind(match[2]), int(match[3]))


def _check_sends(rows: list[list[str]], sent: list[list[str]]) -> None:
    """Raises ValueError unless the sends are those that the tasks need, and no rank waits for ever.

    Args:
        rows: the cells of each rank, as they were read.
        sent: the cells that we write for the same tasks.
    """
    for r, (row, expected_row) in enumerate(zip(rows, sent, strict=True)):
        count = Counter(filter(_SENDS.search, row))
        expected = Counter(filter(_SENDS.search, expected_row))
        if count != expected:
            cell = min((count - expected) + (expected - count))
            raise ValueError(
                f"rank {r} must send and receive other values: {cell} {count[cell]} times, not {expected[cell]}"
            )
    # The order may be another than ours, so it is played too, this time with the sends.
    last = max(int(re.split(r"\D", cell)[0]) for row in rows for cell in row)
    done = set[str]()
    at = [0] * len(rows)
    while any(at[r] < len(row) for r, row in enumerate(rows)):
        before = sum(at)
        for r, row in enumerate(rows):
            while at[r] < len(row) and _may_run(row[at[r]], done, last):
                done.add(row[at[r]])
                at[r] += 1
        if sum(at) == before:
            stuck = [row[at[r]] for r, row in enumerate(rows) if at[r] < len(row)]
            raise ValueError(f"the CSV deadlocks: {', '.join(stuck)} wait for ever")


def _may_run(cell: str, done: set[str], last: int) -> bool:
    """Tells whether an action can run.

    Args:
        cell: the action.
        done: those that have run. One of those that the action waits for is enough.
        last: the last stage.
    """
    match = re.match(r"(\d+)([A-Z_]+)(\d*)", cell)
    assert match is not None
    s = int(match[1])
    word = match[2]
    m = match[3]
    # A neighbour's result comes over a RECV, or directly if both stages are on one rank.
    match word:
        case "SEND_F":
            waits_for = {f"{s}F{m}"}
        case "SEND_B":
            waits_for = {f"{s}B{m}", f"{s}I{m}"}
        case "RECV_F":
            waits_for = {f"{s - 1}SEND_F{m}"}
        case "RECV_B":
            waits_for = {f"{s + 1}SEND_B{m}"}
        case "F" if s > 0:
            waits_for = {f"{s}RECV_F{m}", f"{s - 1}F{m}"}
        case "B" | "I" if s < last:
            waits_for = {f"{s}RECV_B{m}", f"{s + 1}B{m}", f"{s + 1}I{m}"}
        case "B" | "I":
            waits_for = {f"{s}F{m}"}
        case _:
            return True
    return not waits_for.isdisjoint(done)


TORCH_CSV = Format(
    "torch-csv",
    _write,
    _read,
    silent=frozenset({PlanPart.CUTS}),
    comment="",
)
