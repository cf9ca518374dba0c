"""torch.distributed.pipelining's CSV of a schedule, with sends (`compute_comms`): a line per rank, `2F0` in its cells.

    0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD      the first rank: RECV_B is what the second one has sent back
    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD

A RECV stands where its SEND is issued, behind what its rank does before: so no two ranks wait for each
other. Behind the last backward of a stage REDUCE_GRAD divides its gradients by the number of
micro-batches: to a file with sends torch adds nothing itself, and they would be that much too large.
The file is about the order alone. Which layers a stage has is told by the modules that torch is given.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable

from jvpipe.exports.format import (
    Format,
    Part,
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
"""What adds to the gradients of weights."""
RULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")
_CELL = re.compile(
    r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|\d+(UNSHARD|RESHARD|REDUCE_GRAD)"
)
_SENDS = re.compile("SEND|RECV")


def write(plan: Plan, outline: Outline) -> str:
    """The lists of a plan with sends, rank by rank; a plan that updates within a step has those of 1F1B."""
    lists = by_device(plan, lists_for(plan, outline.microbatches))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(with_sends(lists))
    return out.getvalue()


def with_sends(lists: TaskLists) -> list[list[str]]:
    """Adds SEND and RECV to lists; ValueError if tasks wait for each other."""
    rank = {task.stage: r for r, tasks in enumerate(lists) for task in tasks}
    rows: list[list[str]] = [[] for _ in lists]
    done, at, last = set[Task](), [0] * len(lists), max(rank, default=0)
    backwards = Counter(task.stage for tasks in lists for task in tasks if task.kind in _ADDS)
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
            if to is not None and rank[to] != r:
                letter = "F" if task.kind == Kind.F else "B"
                rows[r].append(f"{task.stage}SEND_{letter}{task.microbatch}")
                rows[rank[to]].append(f"{to}RECV_{letter}{task.microbatch}")
            backwards[task.stage] -= task.kind in _ADDS
            if task.kind in _ADDS and not backwards[task.stage]:
                rows[r].append(f"{task.stage}REDUCE_GRAD")
        if sum(at) == before:  # each round runs a task, or none ever will
            stuck = [tasks[at[r]] for r, tasks in enumerate(lists) if at[r] < len(tasks)]
            raise cannot_progress({task: _needs(task, last) for task in stuck})
    return rows


def _next_stage(task: Task, last: int) -> int | None:
    """The stage that waits for what a task makes."""
    if task.kind == Kind.F:
        return task.stage + 1 if task.stage < last else None
    return task.stage - 1 if task.kind in (Kind.B, Kind.I) and task.stage else None


def _needs(task: Task, last: int) -> list[Task]:
    """Of which one must be there before a task."""
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
    needs = _needs(task, last)
    return not needs or any(each in done for each in needs)


def read(text: str, outline: Outline) -> Plan:
    """Reads lists, with sends or without; the layers are shared evenly, for the file does not say how."""
    rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    lists = tuple(tuple(_tasks(row)) for row in rows if row)
    if not lists or not all(lists):
        raise ValueError("the CSV has a rank without tasks: write a line for each")
    rank = ranks_of(lists)
    stages, layers = len(rank), len(outline.layers)
    if stages > layers:
        raise ValueError(f"the CSV has {stages} stages, the model has {layers} layers")
    sent = with_sends(lists)  # refuses tasks that wait for each other
    if any("_" in cell for row in rows for cell in row):
        _check_sends(rows, sent)
    counts = [layers // stages + (s < layers % stages) for s in range(stages)]
    plan = Plan.from_cuts(counts, [rank[s] for s in range(stages)], outline=outline)
    return with_lists(plan, lists, RULES)


def _tasks(row: Iterable[str]) -> Iterable[Task]:
    for cell in row:
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"'{cell}' is no action of torch's: write 2F0, 2SEND_F0")
        if match[2] and "_" not in match[2]:
            yield Task(int(match[1]), Kind(match[2]), int(match[3]))


def _check_sends(rows: list[list[str]], sent: list[list[str]]) -> None:
    """Raises ValueError unless the sends are those that the tasks need, and no rank waits for ever."""
    for r, (row, need) in enumerate(zip(rows, sent, strict=True)):
        there, want = (
            Counter(cell for cell in each if _SENDS.search(cell)) for each in (row, need)
        )
        if there != want:
            cell = min((there - want) + (want - there))
            raise ValueError(
                f"rank {r} must send and receive other values: {cell} {there[cell]} times, not {want[cell]}"
            )
    at, done = [0] * len(rows), set[str]()
    last = max(int(re.split(r"\D", cell)[0]) for row in rows for cell in row)
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
    """Whether what an action waits for is done; `last` is the last stage."""
    match = re.match(r"(\d+)([A-Z_]+)(\d*)", cell)
    assert match is not None
    s, word, m = int(match[1]), match[2], match[3]
    back = {f"{s + 1}B{m}", f"{s + 1}I{m}", f"{s}RECV_B{m}"} if s < last else {f"{s}F{m}"}
    one_of = {
        "SEND_F": {f"{s}F{m}"},
        "SEND_B": {f"{s}B{m}", f"{s}I{m}"},
        "RECV_F": {f"{s - 1}SEND_F{m}"},
        "RECV_B": {f"{s + 1}SEND_B{m}"},
        str(Kind.F): {f"{s}RECV_F{m}", f"{s - 1}F{m}"} if s else set[str](),
        str(Kind.B): back,
        str(Kind.I): back,
    }.get(word, set())
    return not one_of or bool(one_of & done)


TORCH_CSV = Format("torch-csv", write, read, silent=frozenset({Part.CUTS}), comment="")
