"""Defines the format of torch.distributed.pipelining: a CSV of actions, with a line for each rank.

The file holds only the order of actions: tasks, sends and receives, as torch's `compute_comms` has
them. Torch takes the layers of each stage from the user's module. Each cell begins with the stage,
and ends with the micro-batch if the action has one:

    rank 0    0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
    rank 1    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD

SEND_F and RECV_F pass an activation on; SEND_B and RECV_B pass its cotangent back. When a SEND is
appended to the row of its rank, the RECV is appended to the row of the receiver. So all ranks run
their sends and receives in one common order, and no two ranks can wait for each other.

REDUCE_GRAD follows the last backward of a stage, and divides the stage's gradients by the number of
micro-batches. Torch adds this action to its own schedules, but not to a file with sends.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from jvpipe.exports.format import (
    Format,
    lists_by_device,
    ranks_of,
    with_lists,
)
from jvpipe.ir.kinds import Kind
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists, cannot_progress

T = TypeVar("T")
_ADDS = (Kind.B, Kind.W)
"""The kinds of tasks that add to the gradients of weights: whole backwards, and halves W."""
RULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")
_CELL = re.compile(
    r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|\d+(UNSHARD|RESHARD|REDUCE_GRAD)"
)
_SENDS = re.compile("SEND|RECV")


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the task lists of a plan, with their sends and receives, rank by rank."""
    lists = lists_by_device(plan, outline.microbatches)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(with_sends(lists))
    return out.getvalue()


def with_sends(lists: TaskLists) -> list[list[str]]:
    """Adds SEND, RECV and REDUCE_GRAD to task lists.

    Args:
        lists: the tasks of each rank, without sends and receives.

    Returns:
        The cells of each rank, with one cell per action.

    Raises:
        ValueError: tasks wait for each other.
    """
    rank = ranks_of(lists)
    last = max(rank, default=0)
    rows: list[list[str]] = [[] for _ in lists]
    # `backwards` counts, for each stage, the tasks that must still add to its gradients.
    tasks = chain.from_iterable(lists)
    backwards = Counter(task.stage for task in tasks if task.kind in _ADDS)

    is_ready = partial(_ready, last=last)

    def stuck(waiting: Iterable[Task]) -> ValueError:
        return cannot_progress({task: _needs(task, last) for task in waiting})

    for r, task in _played(lists, is_ready, stuck):
        rows[r].append(str(task))
        to = _next_stage(task, last)
        # Two stages on the same rank need no send.
        if to is not None and rank[to] != r:
            letter = "F" if task.kind == Kind.F else "B"
            rows[r].append(f"{task.stage}SEND_{letter}{task.microbatch}")
            rows[rank[to]].append(f"{to}RECV_{letter}{task.microbatch}")
        backwards[task.stage] -= task.kind in _ADDS
        # The gradients of a stage are complete after its last B or W.
        if task.kind in _ADDS and not backwards[task.stage]:
            rows[r].append(f"{task.stage}REDUCE_GRAD")
    return rows


def _played(
    lists: Sequence[Sequence[T]],
    is_ready: Callable[[T, set[T]], bool],
    stuck: Callable[[list[T]], ValueError],
) -> Iterator[tuple[int, T]]:
    """Yields all actions with their ranks, in an order in which the actions can run.

    In each round, each rank runs its next action if the action is ready.

    Args:
        lists: the actions of each rank.
        is_ready: tells whether an action can run after a set of actions.
        stuck: makes the error for the case that no rank's next action can run.
    """
    done = set[T]()
    at = [0] * len(lists)  # the position of each rank's next action
    # The loop ends, because each round runs an action or raises.
    while True:
        waiting = [r for r, actions in enumerate(lists) if at[r] < len(actions)]
        if not waiting:
            return
        before = sum(at)
        for r in waiting:
            action = lists[r][at[r]]
            if is_ready(action, done):
                done.add(action)
                at[r] += 1
                yield r, action
        if sum(at) == before:  # no action ran, so none will run in the next round
            raise stuck([lists[r][at[r]] for r in waiting])


def _next_stage(task: Task, last: int) -> int | None:
    """Returns the stage that needs a task's result; None if no stage needs it.

    `last` is the number of the pipeline's last stage, here and in the functions below.
    """
    if task.kind == Kind.F:
        return task.stage + 1 if task.stage < last else None
    sends_back = task.kind in (Kind.B, Kind.I) and task.stage > 0
    return task.stage - 1 if sends_back else None


def _needs(task: Task, last: int) -> list[Task]:
    """Returns alternatives: one of these tasks must be done before `task` can run."""
    s, _, m = task
    match task.kind:
        case Kind.F:
            return [Task(s - 1, Kind.F, m)] if s else []
        case Kind.B | Kind.I if s < last:
            return [Task(s + 1, Kind.B, m), Task(s + 1, Kind.I, m)]
        case Kind.B | Kind.I:
            return [Task(s, Kind.F, m)]
        case Kind.W:
            return [Task(s, Kind.I, m)]
        case _:
            raise ValueError(f"{task} cannot be written: torch takes only F, B, I and W")


def _ready(task: Task, done: set[Task], last: int) -> bool:
    """Tells whether a task can run after the tasks in `done`."""
    needs = _needs(task, last)
    return not needs or not done.isdisjoint(needs)


def _read(text: str, outline: Outline) -> Plan:
    """Reads a plan from task lists with or without sends and receives.

    The file does not say which layers a stage has, so the layers are divided evenly among stages.

    Raises:
        ValueError: actions are wrong or wait for each other, or there are more stages than layers.
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
    # If the division leaves a remainder, each of the first stages gets one more layer.
    share, rest = divmod(layers, stages)
    counts = [share + (s < rest) for s in range(stages)]
    devices = [rank[s] for s in range(stages)]
    plan = Plan.from_cuts(counts, devices, outline=outline)
    return with_lists(plan, lists, RULES)


def _tasks(row: Iterable[str]) -> Iterable[Task]:
    """Yields the tasks among a row's actions; raises ValueError for unknown actions."""
    for cell in row:
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"'{cell}' is not an action of torch's: write 2F0, 2SEND_F0")
        if match[2] and "_" not in match[2]:
            yield Task(int(match[1]), Kind(match[2]), int(match[3]))


def _check_sends(rows: list[list[str]], sent: list[list[str]]) -> None:
    """Checks the sends and receives of a file.

    Args:
        rows: the cells of each rank, as they were read.
        sent: the cells that `with_sends` makes for the same tasks.

    Raises:
        ValueError: a send or receive is missing or superfluous, or ranks deadlock.
    """
    for r, (row, expected_row) in enumerate(zip(rows, sent, strict=True)):
        count = Counter(filter(_SENDS.search, row))
        expected = Counter(filter(_SENDS.search, expected_row))
        if count != expected:
            cell = min((count - expected) + (expected - count))
            raise ValueError(
                f"rank {r} must send and receive other values: {cell} {count[cell]} times, not "
                f"{expected[cell]}"
            )
    # The file may order its sends differently from `sent`, so ranks might wait for each other. This
    # loop runs the file's rows with their sends and receives.
    cells = chain.from_iterable(rows)
    last = max(int(re.split(r"\D", cell)[0]) for cell in cells)

    def stuck(cells: Iterable[str]) -> ValueError:
        return ValueError(f"the CSV deadlocks: {', '.join(cells)} wait for ever")

    rank_of = {int(re.split(r"\D", cell)[0]): r for r, row in enumerate(rows) for cell in row}
    may_run = partial(_may_run, last=last, rank_of=rank_of)
    for _ in _played(rows, may_run, stuck):
        pass


def _may_run(cell: str, done: set[str], last: int, rank_of: Mapping[int, int]) -> bool:
    """Tells whether an action can run.

    Args:
        cell: the action, such as 0SEND_F0.
        done: the actions that have run.
        last: the number of the last stage.
        rank_of: the rank of each stage.
    """
    match = re.match(r"(\d+)([A-Z_]+)(\d*)", cell)
    assert match
    stage, word, m = match.groups()
    s = int(stage)
    # One of the actions in `waits_for` must have run. The result of a neighboring stage comes from
    # a RECV, or directly from its task if both stages are on one rank.
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
            is_beside = rank_of[s - 1] == rank_of[s]
            waits_for = {f"{s - 1}F{m}"} if is_beside else {f"{s}RECV_F{m}"}
        case "B" | "I" if s < last:
            is_beside = rank_of[s + 1] == rank_of[s]
            waits_for = {f"{s + 1}B{m}", f"{s + 1}I{m}"} if is_beside else {f"{s}RECV_B{m}"}
        case "B" | "I":
            waits_for = {f"{s}F{m}"}
        case _:
            return True
    return not waits_for.isdisjoint(done)


TORCH_CSV = Format(
    "torch-csv",
    _write,
    _read,
    has_cuts=False,
    comment="",
)
