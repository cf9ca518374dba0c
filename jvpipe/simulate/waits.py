"""Finds what the tasks of stages wait for, and adds the tasks that follow from their lists.

A forward (F) waits for the values of the stage before, and a backward (B) for the cotangents of the
stage after. I is the first half of a split backward, and what is true of B is true of I. Some
values that an F leaves for its B may be swapped: copied to the host (OUT) and back (IN).

A device holds the swapped values of at most two micro-batches at a time. Two rules keep this bound.
The drawing shows them on one device and its link to the host; time runs to the right:

    device    F0   F1   F2   F3   ...        B0   B1   B2
    link           OUT0 OUT1 OUT2 ...   IN0  IN1  IN2

    F     waits for the OUTs of all earlier forwards on the device, except the last OUT. F2 waits
          for OUT0, so that only the values of F1 are left when F2 makes its own.
    IN    waits until the B before its own has begun, and until the last OUT before this
          earlier B has ended. IN2 waits for B1 to begin, because then the values that B0 has read
          are gone, and only those of B1 are left. The first IN waits as an F does.

Nothing is swapped for a B that comes directly after its own F.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task
from jvpipe.simulate.work_parts import PARTS, Features

Codes = tuple[int, ...]
"""The codes of tasks (see `StageWork` in stages.py)."""
CodedTask = tuple[int, Codes]
"""The code of a task, and the codes of the tasks that it waits for."""


class Around(NamedTuple):
    """The codes of a stage's tasks for micro-batch 0, and of the tasks that they wait for.

    The codes for micro-batch m are larger by m. F waits for the `source`, which brings values from
    the stage before. B waits for the `answer`, which brings cotangents from the next stage, or for
    the `half_answer` if the next stage splits its backward. `sends` says whether a SEND follows F,
    and `returns` whether a RETURN follows B.
    """

    code: Mapping[Kind, int]
    source: int | None
    answer: int | None
    half_answer: int | None
    sends: bool
    returns: bool

    @staticmethod
    def of(
        s: int,
        places: Sequence[int],
        on: Features,
        M: int,
    ) -> "Around":
        """Finds the tasks around a stage.

        Args:
            s: the stage.
            places: the device of each stage.
            on: the parts that stages need.
            M: the number of micro-batches.
        """
        stage = len(PARTS) * M  # from a task's code to that of the same task on the next stage
        codes = range(s * stage, (s + 1) * stage, M)
        code: dict[Kind, int] = dict(zip(PARTS, codes, strict=True))
        sends = returns = False
        source = answer = half_answer = None
        if s > 0:
            returns = on.sends and places[s] != places[s - 1]
            source = code[Kind.SEND if returns else Kind.F] - stage
        if s < len(places) - 1:
            sends = on.sends and places[s] != places[s + 1]
            answer = code[Kind.RETURN if sends else Kind.B] + stage
            half_answer = code[Kind.RETURN if sends else Kind.I] + stage
        return Around(
            code,
            source,
            answer,
            half_answer,
            sends,
            returns,
        )


class _Walk:
    """A walk along the list of a device, which finds what each task waits for.

    It leaves out the wait for the previous task on the device, which `TaskGraph` adds.

    Args:
        on: the parts that stages need.
        around: the codes around each stage.
        halves: pairs of a stage and a micro-batch whose backward is split.
    """

    def __init__(
        self,
        on: Features,
        around: Sequence[Around],
        halves: Collection[tuple[int, int]],
    ) -> None:
        self.tasks: list[CodedTask] = []  # so far
        self.last: Codes = ()  # the task before this one on the device
        self._on = on
        self._around = around
        self._halves = halves
        self._outs: list[int] = []
        # What an IN waits for: the tasks that the last B waited for, and the last OUT before this
        # B. When these tasks have ended, the B begins. None before the first B.
        self._begun: Codes | None = None

    def forward(self, task: Task, following: Task | None) -> None:
        """Adds F with the copies after it.

        Args:
            task: the forward.
            following: the next task on the device.
        """
        s, _, m = task
        code, source, _, _, sends, _ = self._around[s]
        needs = () if source is None else (source + m,)
        # The OUTs of a device run one after another, so when the second-to-last has ended, all
        # before it have ended, too.
        room = self._outs[-2:-1]
        self.last = (code[Kind.F] + m,)
        self.tasks.append((self.last[0], (*needs, *room)))
        if self._on.swaps and not _is_own_backward(task, following):
            out = code[Kind.OUT] + m
            self._outs.append(out)
            self.tasks.append((out, self.last))
        if sends:
            self.tasks.append((code[Kind.SEND] + m, self.last))

    def backward(self, task: Task) -> None:
        """Adds B or I, between the tasks that make its inputs and the copy of its result."""
        s, kind, m = task
        code, _, answer, half_answer, _, returns = self._around[s]
        after = half_answer if (s + 1, m) in self._halves else answer
        forward = code[Kind.F] + m
        needs: Codes = (forward,)
        if self._on.swaps and self.last != (forward,):
            # Before its first B, the device has room when all OUTs but the last have ended.
            room = self._outs[-2:-1] if self._begun is None else self._begun
            fetch = code[Kind.IN] + m
            self.tasks.append((fetch, (code[Kind.OUT] + m, *room)))
            needs = (*needs, fetch)
        if self._on.recompute:
            again = code[Kind.R] + m
            self.tasks.append((again, needs))
            needs = self.last = (again,)
        if after is not None:
            needs = (*needs, after + m)
        last_out = self._outs[-1:]
        self._begun = (*self.last, *needs, *last_out)
        self.last = (code[kind] + m,)
        self.tasks.append((self.last[0], needs))
        if returns:
            self.tasks.append((code[Kind.RETURN] + m, self.last))


def device_waits(
    tasks: Sequence[Task],
    on: Features,
    around: Sequence[Around],
    halves: Collection[tuple[int, int]],
) -> Sequence[CodedTask]:
    """Returns a device's tasks in order, with the tasks that are added: copies, R and REDUCE.

    Args:
        tasks: the list of the device.
        on: the parts that stages need.
        around: the codes around each stage.
        halves: pairs of a stage and a micro-batch whose backward is split.
    """
    walk = _Walk(on, around, halves)
    tasks = [task for task in tasks if on.updates or task.kind != Kind.U]
    ends: dict[int, Task] = {}  # by stage: its last backward
    if on.reduces:
        ends = {task.stage: task for task in tasks if KINDS[task.kind].accumulates}
    for task, following in zip(tasks, [*tasks[1:], None], strict=True):
        s, kind, m = task
        code = around[s].code
        match kind:
            case Kind.F:
                walk.forward(task, following)
            case Kind.B | Kind.I:
                walk.backward(task)
            case Kind.W:  # it needs nothing from other stages
                walk.last = (code[Kind.W] + m,)
                walk.tasks.append((walk.last[0], (code[Kind.I] + m,)))
            case Kind.U:
                walk.last = (code[Kind.U] + m,)
                needs: Codes = ()
                if s in ends:
                    needs = (code[Kind.REDUCE] + ends[s].microbatch,)
                walk.tasks.append((walk.last[0], needs))
            case _:
                raise ValueError(f"task {task}: lists at the level of stages hold F, B, I, W and U")
        if ends.get(s) == task:  # the gradients of the stage are complete
            walk.tasks.append((code[Kind.REDUCE] + m, walk.last))
    return walk.tasks


def _is_own_backward(task: Task, following: Task | None) -> bool:
    """Tells whether the task after a forward is its own backward, or the backward's first half."""
    if following is None or KINDS[following.kind].in_flight >= 0:
        return False
    is_same_stage = following.stage == task.stage
    return is_same_stage and following.microbatch == task.microbatch
