"""A schedule: the order of tasks on each stage, and what that order costs in memory."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists

Rule = Literal["newest", "first stage", "one behind"]
"""Which version a forward reads: its stage's newest, that which the first stage read, or the one before its batch's."""


def one_version(stage: int, stages: int) -> int:
    """Parameters that are updated only when nothing is in flight."""
    return 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A family of task lists.

    `lists` makes them for a number of devices and micro-batches, a list per device: of a step if the schedule is
    `synchronous`, of a whole stream with its warm-up and drain if it is not. A device runs as many stages as there are
    `chunks`; they lie on the devices in a loop (0, 1, 2, 0, 1, 2), with `vee` there and back (0, 1, 2, 2, 1, 0).
    `versions` are the versions of its parameters that a stage (counted from 0) holds.

    An asynchronous schedule updates a stage every `update_every` micro-batches (0: those of a step). A forward reads
    the version that `rule` says. A backward reads the same if the schedule stashes it, else its stage's newest:
    corrected with the discrepancy of PipeMare if there is a `decay`; then updates are scaled down for the first
    `anneal_updates`, and the first `warmup_updates` are synchronous. With `predicts` a forward reads the weights that
    its backward is expected to find (XPipe).
    """

    name: str
    lists: Callable[[int, int], TaskLists]
    chunks: int = 1
    vee: bool = False
    synchronous: bool = True
    versions: Callable[[int, int], int] = one_version
    update_every: int = 0
    rule: Rule = "newest"
    stash: bool = True
    decay: float | None = None
    anneal_updates: int = 0
    warmup_updates: int = 0
    predicts: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Lists what distinguishes it from other schedules, as JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if not callable(value)}

    def device_of(self, stage: int, devices: int) -> int:
        """The device of a stage, of so many.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule("1f1b").device_of(stage, 3) for stage in range(3)]
        [0, 1, 2]
        """
        turn, place = divmod(stage, devices)
        return devices - 1 - place if self.vee and turn % 2 else place

    def in_flight(self, stages: int, microbatches: int) -> tuple[int, ...]:
        """The most micro-batches between their forward and their backward, on each stage; counted from the lists.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("1f1b").in_flight(3, 8), find_schedule("gpipe").in_flight(3, 8)
        ((3, 2, 1), (8, 8, 8))
        """
        return _in_flight(self.lists, stages, microbatches if self.synchronous else max(microbatches, 2 * stages))

    def period(self, microbatches: int) -> int:
        """Micro-batches per update, of those of a step."""
        return self.update_every or microbatches

    def with_updates(self, stages: int, microbatches: int, steps: int = 1) -> TaskLists:
        """The lists of a stream of so many steps, with the updates of an asynchronous schedule: U<m> after B<m>.

        Args:
            stages: how many.
            microbatches: of a step.
            steps: of the stream.

        >>> from jvpipe.ir.task import text
        >>> from jvpipe.schedules import find_schedule
        >>> text(find_schedule("pipedream").with_updates(2, 3)[0])
        '0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2'
        """
        every = self.period(microbatches)
        return tuple(
            tuple(
                one
                for task in tasks
                for one in ((task, Task(task.stage, Kind.U, task.microbatch)) if _updates(task, every) else (task,))
            )
            for tasks in self.lists(stages, microbatches * steps)
        )

    def check(self, stages: int, microbatches: int) -> None:
        """Raises ValueError if so few micro-batches do not do."""
        every = self.period(microbatches)
        if self.synchronous:
            return
        if microbatches % every:
            raise ValueError(
                f"update_every={every} must divide the {microbatches} micro-batches of a step: use microbatches="
                f"{-(-microbatches // every) * every}"
            )
        if self.rule == "one behind" and microbatches < stages:
            given = f"{microbatches} {'is' if microbatches == 1 else 'are'} given"
            raise ValueError(
                f"{self.name} on {stages} stages needs at least {stages} micro-batches, {given}: with fewer, a "
                f"micro-batch would still be in flight two updates later. Use microbatches={stages}"
            )


def at_least(least: int, **options: int) -> None:
    """Raises ValueError if one of a schedule's options is less.

    >>> at_least(1, update_every=0)
    Traceback (most recent call last):
    ValueError: update_every must be at least 1, not 0
    """
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def _updates(task: Task, every: int) -> bool:
    return KINDS[task.kind].accumulates and (task.microbatch + 1) % every == 0


@lru_cache(maxsize=256)
def _in_flight(lists: Callable[[int, int], TaskLists], stages: int, microbatches: int) -> tuple[int, ...]:
    return tuple(max(accumulate(KINDS[task.kind].in_flight for task in tasks)) for tasks in lists(stages, microbatches))
