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
from dataclasses import dataclass, field

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task
from jvpipe.simulate.work_parts import Features

Codes = tuple[int, ...]
"""The codes of tasks (see `StageWork` in stages.py)."""
CodedTask = tuple[int, Codes]
"""The code of a task, and the codes of the tasks that it waits for."""


@dataclass
class DeviceWalk:
    """A walk along the list of a device, which finds what each task waits for.

    It leaves out the wait for the previous task on the device, which `TaskGraph` adds. A walk
    serves for one device.

    Attributes:
        on: the parts that stages need.
        codes: for each stage, the codes of its tasks for micro-batch 0; that for micro-batch m is
            larger by m.
        crosses: for each stage, whether SEND brings its values to the next stage, and RETURN the
            cotangents back; false for the last stage.
        halves: pairs of a stage and a micro-batch whose backward is split.
        tasks: the tasks so far.
        last: the task before this one on the device.
        outs: the OUTs so far.
        begun: what an IN waits for: the tasks that the last B waited for, and the last OUT before
            this B. When these tasks have ended, the B begins. None before the first B.
    """

    on: Features
    codes: Sequence[Mapping[Kind, int]]
    crosses: Sequence[bool]
    halves: Collection[tuple[int, int]]
    tasks: list[CodedTask] = field(default_factory=list)
    last: Codes = ()
    outs: list[int] = field(default_factory=list)
    begun: Codes | None = None

    def along(self, tasks: Sequence[Task]) -> Sequence[CodedTask]:
        """Returns a device's tasks in order, with the tasks that are added: copies, R and REDUCE.

        Args:
            tasks: the list of the device.
        """
        tasks = [task for task in tasks if self.on.updates or task.kind != Kind.U]
        ends: dict[int, Task] = {}  # by stage: its last backward
        if self.on.reduces:
            ends = {task.stage: task for task in tasks if KINDS[task.kind].accumulates}
        for task, following in zip(tasks, [*tasks[1:], None], strict=True):
            s, kind, m = task
            code = self.codes[s]
            match kind:
                case Kind.F:
                    self.forward(task, following)
                case Kind.B | Kind.I:
                    self.backward(task)
                case Kind.W:  # it needs nothing from other stages
                    self.run(code[Kind.W] + m, (code[Kind.I] + m,))
                case Kind.U:
                    needs: Codes = ()
                    if s in ends:
                        needs = (code[Kind.REDUCE] + ends[s].microbatch,)
                    self.run(code[Kind.U] + m, needs)
                case _:
                    raise ValueError(
                        f"task {task}: lists at the level of stages hold F, B, I, W and U"
                    )
            if ends.get(s) == task:  # the gradients of the stage are complete
                self.after(code[Kind.REDUCE] + m)
        return self.tasks

    def run(self, code: int, needs: Codes) -> None:
        """Adds a task of the device itself."""
        self.tasks.append((code, needs))
        self.last = (code,)

    def after(self, code: int) -> None:
        """Adds a copy or a sum of what the task before has made."""
        self.tasks.append((code, self.last))

    def forward(self, task: Task, following: Task | None) -> None:
        """Adds F with the copies after it.

        Args:
            task: the forward.
            following: the next task on the device.
        """
        s, _, m = task
        code = self.codes[s]
        needs: Codes = ()
        if s > 0:
            source = Kind.SEND if self.crosses[s - 1] else Kind.F
            needs = (self.codes[s - 1][source] + m,)
        # The OUTs of a device run one after another, so when the second-to-last has ended, all
        # before it have ended, too.
        room = self.outs[-2:-1]
        self.run(code[Kind.F] + m, (*needs, *room))
        if self.on.swaps and not _is_own_backward(task, following):
            out = code[Kind.OUT] + m
            self.outs.append(out)
            self.after(out)
        if self.crosses[s]:
            self.after(code[Kind.SEND] + m)

    def backward(self, task: Task) -> None:
        """Adds B or I, between the tasks that make its inputs and the copy of its result."""
        s, kind, m = task
        code = self.codes[s]
        forward = code[Kind.F] + m
        needs: Codes = (forward,)
        if self.on.swaps and self.last != needs:
            # Before its first B, the device has room when all OUTs but the last have ended.
            room = self.outs[-2:-1] if self.begun is None else self.begun
            fetch = code[Kind.IN] + m
            self.tasks.append((fetch, (code[Kind.OUT] + m, *room)))
            needs = (forward, fetch)
        if self.on.recompute:
            again = code[Kind.R] + m
            self.run(again, needs)
            needs = (again,)
        if s + 1 < len(self.codes):
            answer = Kind.I if (s + 1, m) in self.halves else Kind.B
            if self.crosses[s]:
                answer = Kind.RETURN
            needs = (*needs, self.codes[s + 1][answer] + m)
        last_out = self.outs[-1:]
        self.begun = (*self.last, *needs, *last_out)
        self.run(code[kind] + m, needs)
        if self.crosses[s - 1]:
            self.after(code[Kind.RETURN] + m)


def _is_own_backward(task: Task, following: Task | None) -> bool:
    """Tells whether the task after a forward is its own backward, or the backward's first half."""
    if following is None or KINDS[following.kind].in_flight >= 0:
        return False
    return following == task._replace(kind=following.kind)
