"""A schedule: the order of tasks on each stage, and what that order costs in memory."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.halves import merged
from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole, whole_numbers

_log = logging.getLogger("jvpipe")

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
        if is_dataclass(self.lists) and not isinstance(self.lists, type):
            values |= {
                name: list(x) if isinstance(x, tuple) else x
                for name, x in asdict(self.lists).items()
            }
        return {name: value for name, value in values.items() if not callable(value)}

    def with_lists(self, lists: Callable[[int, int], TaskLists]) -> "Schedule":
        """The same rules over other lists."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        made: dict[str, Any] = kept | {"lists": lists}
        return Schedule(**made)

    def device_of(self, stage: int, devices: int) -> int:
        """The device of a stage, of so many.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule("1f1b").device_of(stage, 3) for stage in range(3)]
        [0, 1, 2]
        """
        turn, place = divmod(stage, devices)
        return devices - 1 - place if self.vee and turn % 2 else place

    def stages_on(self, devices: int) -> int:
        """The number of stages on so many devices."""
        return self.chunks * devices

    def tasks(self, devices: int, microbatches: int) -> TaskLists:
        """The lists as they are run: see `merged`.

        >>> from jvpipe.ir.task import text
        >>> from jvpipe.schedules import find_schedule
        >>> text(find_schedule("zb-h1").tasks(2, 2)[1])
        '1F0 1I0 1F1 1I1 1W0 1W1'
        """
        return merged(self.lists(devices, microbatches))

    def held(self, devices: int, microbatches: int) -> tuple[tuple["Holding", ...], ...]:
        """The most that each device holds at once: vectors, none of which is nowhere more than another; from the lists.

        A device's bytes are the most, over its vectors, of the sum over its chunks of k A + w H: k micro-batches that
        a forward has left A bytes of, w of which the second half of the backward still needs H.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("zb-h1").held(2, 8)
        ((((2, 0),),), (((1, 1),), ((0, 2),)))
        >>> find_schedule("interleaved").held(2, 4)[1]  # three of the first chunk, or two and one of the second
        (((2, 0), (1, 0)), ((3, 0), (0, 0)))
        """
        return _held(self, devices, microbatches)

    def in_flight(self, devices: int, microbatches: int) -> tuple[int, ...]:
        """The most micro-batches between their forward and their backward, on each stage; counted from the lists.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("1f1b").in_flight(3, 8), find_schedule("gpipe").in_flight(3, 8)
        ((3, 2, 1), (8, 8, 8))
        """
        return _in_flight(self, devices, microbatches)

    def splits(self, devices: int, microbatches: int) -> bool:
        """Tells whether there are backwards in two halves."""
        return _splits(self, devices, microbatches)

    def phases(self, devices: int, microbatches: int) -> int:
        """Counts how often a step waits for its slowest stage in turn, from the lists.

        Twice where every forward of a device comes before its first backward: the slowest forward and the slowest
        backward need not be of one stage. Once where they alternate.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule(name).phases(2, 4) for name in ("1f1b", "gpipe")]
        [1, 2]
        """
        return _phases(self, devices, microbatches)

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
                for one in (
                    (task, Task(task.stage, Kind.U, task.microbatch))
                    if _updates(task, every)
                    else (task,)
                )
            )
            for tasks in self.lists(stages, microbatches * steps)
        )

    def check(self, devices: int, microbatches: int) -> None:
        """Raises ValueError if so few micro-batches do not do."""
        if self.synchronous:
            return
        split = self.splits(devices, microbatches)
        if split or self.chunks > 1:
            what = "backwards in two halves" if split else f"{self.chunks} chunks per device"
            raise ValueError(
                f"{self.name} has {what} and updates before the step ends: updates would come between them. Use whole "
                f"backwards and one chunk, or a synchronous schedule, such as 'zb-h1' or 'interleaved'"
            )
        every = self.period(microbatches)
        if microbatches % every:
            raise ValueError(
                f"update_every={every} must divide the {microbatches} micro-batches of a step: use microbatches="
                f"{-(-microbatches // every) * every}"
            )
        if self.rule == "one behind" and microbatches < devices:
            given = f"{microbatches} {'is' if microbatches == 1 else 'are'} given"
            raise ValueError(
                f"{self.name} on {devices} stages needs at least {devices} micro-batches, {given}: with fewer, a "
                f"micro-batch would still be in flight two updates later. Use microbatches={devices}"
            )

    def warn_of_idle(self, devices: int, microbatches: int) -> None:
        """Warns if so few micro-batches leave devices idle for long."""
        if self.synchronous and microbatches < devices:
            _log.warning("%s", _idle(self, devices, microbatches))

    def check_layers(self, devices: int, layers: int) -> None:
        """Raises ValueError if so few layers do not give every chunk of every device one."""
        if self.stages_on(devices) <= layers:
            return
        if self.chunks == 1:
            raise ValueError(
                f"{devices} stages need as many layers, the model has {layers}: use at most {layers} stages"
            )
        most, stages = (
            layers // devices,
            f"{self.chunks} x {devices} = {self.stages_on(devices)} stages",
        )
        if self.vee:
            cure = "a vee has two chunks per device: use fewer devices, or '1f1b' or 'zb-h1', which have one"
        elif most > 1:
            cure = f"{most} chunks per device would do: use chunks={most}"
        else:
            cure = (
                "one chunk per device would do: use '1f1b' or 'zb-h1'"
                if most
                else "use fewer devices"
            )
        raise ValueError(f"{self.name} needs {stages}, the model has {layers} layers: {cure}")


Holding = tuple[tuple[int, int], ...]
"""Per chunk of a device: micro-batches whose forward has been and whose backward's first half has not; those between
the halves."""


def at_least(least: int, **options: Any) -> None:
    """Raises ValueError if one of a schedule's options is less, or no whole number.

    >>> at_least(1, update_every=0)
    Traceback (most recent call last):
    ValueError: update_every must be a whole number of at least 1, not 0
    """
    for name, value in options.items():
        if not is_whole(value) or value < least:
            raise ValueError(
                f"{name} must be a whole number of at least {least}, not {brief(value)}"
            )


def numbers_of(least: int, name: str, values: Any) -> tuple[int, ...]:
    """The numbers of an option that has one for each device.

    Args:
        least: that each must be.
        name: of the option.
        values: as the user gave them.

    Raises:
        ValueError: they are no such numbers.

    >>> numbers_of(0, "late", [0, 1])
    (0, 1)
    """
    numbers = whole_numbers(name, values)
    for number in numbers:
        at_least(least, **{f"each of {name}": number})
    return numbers


def _updates(task: Task, every: int) -> bool:
    return KINDS[task.kind].accumulates and (task.microbatch + 1) % every == 0


def _idle(schedule: Schedule, devices: int, microbatches: int) -> str:
    """The message for fewer micro-batches than devices; the share is that of equal stages and whole backwards."""
    step = (
        devices + (microbatches - 1) / schedule.chunks
    )  # in units of a device's work on one micro-batch
    share = 1 - microbatches / step
    leave = "micro-batches leave" if microbatches > 1 else "micro-batch leaves"
    return (
        f"{microbatches} {leave} {devices} devices idle for about {share:.0%} of a step under "
        f"{schedule.name}: use microbatches={devices} or more"
    )


@lru_cache(maxsize=256)
def _held(schedule: Schedule, devices: int, microbatches: int) -> tuple[tuple[Holding, ...], ...]:
    count = (
        microbatches if schedule.synchronous else max(microbatches, 2 * devices)
    )  # nothing later holds more
    return tuple(_most(tasks, schedule.chunks, devices) for tasks in schedule.tasks(devices, count))


def _most(tasks: Sequence[Task], chunks: int, devices: int) -> tuple[Holding, ...]:
    """Of what a device holds whenever it is about to hold less of something, all that is not within another."""
    now = [[0, 0] for _ in range(chunks)]
    seen: dict[Holding, None] = {}
    for stage, kind, _ in tasks:
        chunk = now[stage // devices]
        if KINDS[kind].in_flight <= 0:
            seen[tuple((k, w) for k, w in now)] = None
        chunk[0] += KINDS[kind].in_flight
        chunk[1] += KINDS[kind].between
    every = np.array(list(seen)).reshape(len(seen), -1)
    within = (every[:, None] <= every[None]).all(2).sum(1) > 1
    return tuple(vector for vector, inner in zip(seen, within, strict=True) if not inner)


@lru_cache(maxsize=256)
def _in_flight(schedule: Schedule, devices: int, microbatches: int) -> tuple[int, ...]:
    held = schedule.held(devices, microbatches)
    return tuple(
        max(vector[stage // devices][0] for vector in held[schedule.device_of(stage, devices)])
        for stage in range(schedule.stages_on(devices))
    )


@lru_cache(maxsize=256)
def _phases(schedule: Schedule, devices: int, microbatches: int) -> int:
    for tasks in schedule.lists(devices, microbatches):
        forwards = [KINDS[task.kind].in_flight > 0 for task in tasks]
        if forwards != sorted(forwards, reverse=True):
            return 1
    return 2


@lru_cache(maxsize=256)
def _splits(schedule: Schedule, devices: int, microbatches: int) -> bool:
    return any(
        w
        for vectors in schedule.held(devices, microbatches)
        for vector in vectors
        for _, w in vector
    )
