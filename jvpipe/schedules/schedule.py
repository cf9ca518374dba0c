"""A schedule: the order of tasks on each device, and the versions of weights that tasks read.

The counts that planners need, such as the micro-batches in flight (`Schedule.in_flight`), are
computed from the task lists. So a new schedule defines only its lists, and no formulas for counts.

Gradients are added up in the order of a stage's backwards. All schedules in this folder run them in
ascending order of micro-batches, so that all synchronous schedules give bitwise identical results.
A schedule with another order is allowed, but its sums are rounded differently.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.halves import merged
from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole, whole_numbers

_log = logging.getLogger("jvpipe")
_cached = lru_cache(maxsize=256)  # planners ask for the counts of a schedule very often

Rule = Literal["newest", "first stage", "one behind"]
"""The version that a forward reads.

"newest" is the newest version of the forward's stage. "first stage" is the version that the first
stage has read for the same micro-batch. "one behind" is one version older than the version to which
the micro-batch's gradients are applied.
"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A family of task lists, with the rule for the versions of weights that tasks read.

    `lists` is a function of the number of devices and the number of micro-batches. It makes one
    list per device. A `synchronous` schedule has the lists of one step. Any other schedule has the
    lists of a whole stream, from its warm-up to its drain.

    Each device runs `chunks` stages. The stages lie on the devices in a loop or, with `vee`, there
    and back. With three devices, stages 0 to 5 lie on these devices:

        chunks=2             0 1 2 0 1 2
        chunks=2, vee=True   0 1 2 2 1 0

    An asynchronous schedule updates a stage every `update_every` micro-batches (0: once per step).
    A forward reads the version that `rule` names. A backward reads the same version if `stash` is
    true, and otherwise its stage's newest version.

    With a `decay` (PipeMare) the weights of a backward are corrected, the first `anneal_updates`
    updates are scaled down, and the first `warmup_updates` updates are synchronous. With `predicts`
    (XPipe) a forward reads the weights that its backward is expected to find.
    """

    name: str
    lists: Callable[[int, int], TaskLists]
    chunks: int = 1
    vee: bool = False
    synchronous: bool = True
    update_every: int = 0
    rule: Rule = "newest"
    stash: bool = True
    decay: float | None = None
    anneal_updates: int = 0
    warmup_updates: int = 0
    predicts: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Lists the values that distinguish the schedule from others, for JSON."""
        # `lists` is a function, or a dataclass whose fields are options.
        values = dict(vars(self))
        if is_dataclass(self.lists) and not isinstance(self.lists, type):
            for name, value in asdict(self.lists).items():
                values[name] = list(value) if isinstance(value, tuple) else value
        return {name: value for name, value in values.items() if not callable(value)}

    def with_lists(self, lists: Callable[[int, int], TaskLists]) -> "Schedule":
        """Makes a schedule with the same rules and other lists."""
        values: dict[str, Any] = vars(self) | {"lists": lists}
        return Schedule(**values)

    def device_of(self, stage: int, devices: int) -> int:
        """Returns the device that runs a stage, given the number of devices.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule("1f1b").device_of(stage, 3) for stage in range(3)]
        [0, 1, 2]
        """
        turn, place = divmod(stage, devices)
        is_way_back = self.vee and turn % 2
        return devices - 1 - place if is_way_back else place

    def stages_on(self, devices: int) -> int:
        """Counts the stages on a number of devices."""
        return self.chunks * devices

    def tasks(self, devices: int, microbatches: int) -> TaskLists:
        """Makes the task lists, in which `merged` has joined halves of backwards.

        >>> from jvpipe.ir.task import text
        >>> from jvpipe.schedules import find_schedule
        >>> text(find_schedule("zb-h1").tasks(2, 2)[1])
        '1F0 1I0 1F1 1I1 1W0 1W1'
        """
        return merged(self.lists(devices, microbatches))

    @_cached
    def held(self, devices: int, microbatches: int) -> tuple[tuple["Holding", ...], ...]:
        """Finds, for each device, the largest sets of micro-batches that it holds at once.

        The result has vectors for each device. A vector has a pair (k, w) for each chunk: k
        micro-batches are between their forward and their backward, and w are between the two halves
        of their backward. A vector is left out if another vector is at least as large in every
        entry.

        The vectors do not depend on bytes. Let a micro-batch take A bytes of a chunk
        between forward and backward, and H bytes between halves. The peak of a device is
        the maximum, over its vectors, of the sum over its chunks of k A + w H.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("zb-h1").held(2, 8)
        ((((2, 0),),), (((1, 1),), ((0, 2),)))
        >>> find_schedule("interleaved").held(2, 4)[1]  # three of the first chunk, or two and one of the second
        (((2, 0), (1, 0)), ((3, 0), (0, 0)))
        """
        count = microbatches
        if not self.synchronous:
            # After this many micro-batches, the pipeline of a stream is full and holds no more later.
            # For stages whose devices take turns, the lists give the number (`RoundRobin.in_flight`).
            in_flight = getattr(self.lists, "in_flight", ())
            count = max(microbatches, 2 * devices, *in_flight)
        lists = self.tasks(devices, count)
        return tuple(_largest_holdings(tasks, self.chunks, devices) for tasks in lists)

    @_cached
    def in_flight(self, devices: int, microbatches: int) -> tuple[int, ...]:
        """Counts, for each stage, the most micro-batches between their forward and backward.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("1f1b").in_flight(3, 8), find_schedule("gpipe").in_flight(3, 8)
        ((3, 2, 1), (8, 8, 8))
        """
        holdings = self.held(devices, microbatches)
        counts = []
        for stage in range(self.stages_on(devices)):
            vectors = holdings[self.device_of(stage, devices)]
            chunk = stage // devices
            counts.append(max(vector[chunk][0] for vector in vectors))
        return tuple(counts)

    @_cached
    def splits(self, devices: int, microbatches: int) -> bool:
        """Tells whether some backwards run in two halves."""
        vectors = chain.from_iterable(self.held(devices, microbatches))
        return any(between for vector in vectors for _, between in vector)

    @_cached
    def phases(self, devices: int, microbatches: int) -> int:
        """Counts the phases of a step; within a phase, a single slowest stage sets the pace.

        If every device runs all its forwards before its first backward, there are two phases,
        because the stage with the slowest forward may not have the slowest backward. Otherwise
        there is one phase. A stream has one phase, too, because its steps overlap.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule(name).phases(2, 4) for name in ("1f1b", "gpipe")]
        [1, 2]
        """
        if not self.synchronous:
            return 1
        for tasks in self.lists(devices, microbatches):
            is_forward = [KINDS[task.kind].in_flight > 0 for task in tasks]
            if is_forward != sorted(is_forward, reverse=True):  # a forward comes after a backward
                return 1
        return 2

    def period(self, microbatches: int) -> int:
        """Returns the number of micro-batches per update, given the number per step."""
        return self.update_every or microbatches

    def tau(self, stages: int, stage: int) -> int:
        """Returns the most updates between a forward of a stage and the update from its gradient.

        Args:
            stages: the number of stages, with tasks in the order of 1F1B.
            stage: the number of the stage.

        >>> from jvpipe.schedules import PipeMare
        >>> [PipeMare(update_every=2).tau(4, stage) for stage in range(4)]
        [2, 1, 1, 0]
        """
        return math.ceil((stages - 1 - stage) / max(1, self.update_every))

    def updates(self, microbatches: int) -> float:
        """Returns the average number of updates per step, given the micro-batches per step.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule(name).updates(8) for name in ("1f1b", "pipedream", "2bw")]
        [1.0, 8.0, 1.0]
        """
        return microbatches / self.period(microbatches)

    def versions(self, stage: int, stages: int) -> int:
        """Counts the arrays that a stage holds per parameter: versions, and records of updates.

        Args:
            stage: the stage, counted from 0.
            stages: the number of stages.

        >>> from jvpipe.schedules import find_schedule
        >>> [find_schedule("pipedream").versions(stage, 3) for stage in range(3)]
        [3, 2, 1]
        """
        if self.synchronous:
            return 1
        if not self.stash:
            # PipeMare holds its mean of updates. XPipe holds the last update, and predictions while
            # a forward runs. The last stage needs none of them.
            more = (self.decay is not None) + 2 * self.predicts
            return 1 + more * (stage < stages - 1)
        return {"newest": stages - stage, "first stage": stages, "one behind": 2}[self.rule]

    def with_updates(
        self,
        stages: int,
        microbatches: int,
        count: int | None = None,
    ) -> TaskLists:
        """Makes the lists of a stream with updates: U<m> follows B<m> if B<m> completes an update.

        Args:
            stages: the number of stages.
            microbatches: the number of micro-batches of a step.
            count: the number of micro-batches of the stream; None for those of one step.

        >>> from jvpipe.ir.task import text
        >>> from jvpipe.schedules import find_schedule
        >>> text(find_schedule("pipedream").with_updates(2, 3)[0])
        '0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2'
        """
        every = self.period(microbatches)

        def updated(tasks: Sequence[Task]) -> Iterator[Task]:
            for task in tasks:
                yield task
                if KINDS[task.kind].accumulates and (task.microbatch + 1) % every == 0:
                    yield task._replace(kind=Kind.U)

        lists = self.tasks(stages, count or microbatches)
        return tuple(tuple(updated(tasks)) for tasks in lists)

    def check(self, devices: int, microbatches: int) -> None:
        """Checks that an asynchronous schedule can run in steps of this many micro-batches.

        Args:
            devices: the number of devices that the pipeline passes.
            microbatches: the number of micro-batches of a step.

        Raises:
            ValueError: there are too few micro-batches, `update_every` does not divide them, or the
                lists have no place for updates.
        """
        if self.synchronous:
            return
        # `with_updates` puts updates only after whole backwards, on devices with one stage.
        split = self.splits(devices, microbatches)
        if split or self.chunks > 1:
            what = "backwards in two halves" if split else f"{self.chunks} chunks per device"
            raise ValueError(
                f"{self.name} has {what}, which cannot be combined with updates before the step "
                "ends. Use whole backwards and one chunk per device, "
                "or a synchronous schedule, such as 'zb-h1' or 'interleaved'"
            )
        every = self.period(microbatches)
        if microbatches % every:
            raise ValueError(
                f"update_every={every} must divide the {microbatches} micro-batches of a "
                f"step: use microbatches={-(-microbatches // every) * every}"
            )
        if self.rule == "one behind" and microbatches < devices:
            count = f"{microbatches} {'is' if microbatches == 1 else 'are'} given"
            raise ValueError(
                f"{self.name} on {devices} stages needs at least {devices} micro-batches, but "
                f"{count}: with fewer, a micro-batch would still be in flight two updates "
                f"later. Use microbatches={devices}"
            )

    def warn_of_idle(self, devices: int, microbatches: int) -> None:
        """Warns if there are so few micro-batches that devices idle for long.

        The share of idle time in the message assumes that stages are equal and backwards are whole.

        Args:
            devices: the number of devices that the pipeline passes.
            microbatches: the number of micro-batches of a step.
        """
        if not self.synchronous or microbatches >= devices:
            return
        # The seconds of a step, in units of a device's work on one micro-batch.
        step = devices + (microbatches - 1) / self.chunks
        leave = "micro-batches leave" if microbatches > 1 else "micro-batch leaves"
        _log.warning(
            "%d %s %d devices idle for about %.0f%% of a step under %s: use microbatches=%d or "
            "more, unless the loss compares the examples of a batch (contrastive losses, batch "
            "norm) and so depends on the size of micro-batches",
            microbatches,
            leave,
            devices,
            100 * (1 - microbatches / step),
            self.name,
            devices,
        )

    def check_layers(self, devices: int, layers: int) -> None:
        """Raises ValueError if there are fewer layers than chunks on all devices."""
        if self.stages_on(devices) <= layers:
            return
        if self.chunks == 1:
            raise ValueError(
                f"{devices} stages need at least as many layers, but the model has {layers}: "
                f"use at most {layers} stages"
            )
        stages = f"{self.chunks} x {devices} = {self.stages_on(devices)} stages"
        possible = layers // devices
        if self.vee:
            cure = (
                "this schedule has two chunks per device. Use fewer devices, or '1f1b' or 'zb-h1', "
                "which have one chunk per device"
            )
        elif possible > 1:
            cure = f"{possible} chunks per device are possible. Use chunks={possible}"
        elif possible == 1:
            cure = "one chunk per device is possible. Use '1f1b' or 'zb-h1'"
        else:
            cure = "use fewer devices"
        raise ValueError(f"{self.name} needs {stages}, but the model has {layers} layers: {cure}")


Holding = tuple[tuple[int, int], ...]
"""The micro-batches that a device holds at one time: a pair for each of its chunks.

The first number counts micro-batches between their forward and their backward (or its first half).
The second number counts micro-batches between the two halves of their backward.
"""


def at_least(least: int, **options: Any) -> None:
    """Raises ValueError unless all options are whole numbers of at least `least`.

    >>> at_least(1, update_every=0)
    Traceback (most recent call last):
    ValueError: update_every must be a whole number of at least 1, not 0
    """
    for name, value in options.items():
        if not is_whole(value) or value < least:
            raise ValueError(
                f"{name} must be a whole number of at least {least}, not {brief(value)}"
            )


def numbers_of(name: str, values: Any) -> tuple[int, ...] | None:
    """Checks an option that has a number for each device, and returns the numbers as a tuple.

    Args:
        name: the name of the option.
        values: the numbers as the user gave them; None if the option is not given.

    Raises:
        ValueError: a value is not a whole number, or is below 0.

    >>> numbers_of("late", [0, 1])
    (0, 1)
    """
    if values is None:
        return None
    numbers = whole_numbers(name, values)
    for number in numbers:
        at_least(0, **{f"each of {name}": number})
    return numbers


def check_count(name: str, numbers: Sequence[int], devices: int) -> None:
    """Raises ValueError unless an option has as many numbers as there are devices.

    Args:
        name: of the option.
        numbers: its numbers.
        devices: how many devices there are.
    """
    if len(numbers) != devices:
        raise ValueError(
            f"{name}={numbers} has {len(numbers)} numbers, but there are {devices} devices: "
            "give one number for each device"
        )


def _largest_holdings(
    tasks: Sequence[Task],
    chunks: int,
    devices: int,
) -> tuple[Holding, ...]:
    """Finds the holdings of a device, except any that another one equals or exceeds in every entry.

    Only the moments before a task that is not a forward are compared, because each forward only
    adds to what the device holds.

    Args:
        tasks: the tasks of the device.
        chunks: the number of its chunks.
        devices: the number of devices.
    """
    current = [[0, 0] for _ in range(chunks)]
    peaks: dict[Holding, None] = {}
    for stage, kind, _ in tasks:
        info = KINDS[kind]
        chunk = current[stage // devices]
        if info.in_flight <= 0:
            peaks[tuple((k, w) for k, w in current)] = None
        chunk[0] += info.in_flight
        chunk[1] += info.between
    vectors = np.array(list(peaks)).reshape(len(peaks), -1)
    is_within = (vectors[:, None] <= vectors[None]).all(axis=2)  # each holding is within itself
    counts = is_within.sum(axis=1)
    return tuple(peak for peak, count in zip(peaks, counts, strict=True) if count == 1)
