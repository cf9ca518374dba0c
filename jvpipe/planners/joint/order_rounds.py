"""Makes orders in rounds of a forward and a backward per device; second halves fill the gaps.

    device 0    F F F F F      I F I F I W F I W ...         time goes from left to right; F is a
    device 1      F F F      I F I F I W F I W ...           forward, I and W are the first and the
    device 2        F      I F I F I F I W W ...             second half of a backward
                           ^ the first backward; from here on in rounds

Before its first backward, a device runs as many forwards as there is time for until the cotangents
arrive. Then it runs rounds of a forward and a backward. It also runs a W whenever it would
otherwise wait for at least as long as W takes.

A gap may also be shorter than W. Then either W delays the next task, or the device is idle. The
heuristic assumes that the device that has been idle the longest decides how long the step takes.
The slack of another device is how many fewer seconds it has been idle. A wait within the slack is
free, and W is kept for a later gap. A longer gap is filled.

This is the heuristic of Zero Bubble Pipeline Parallelism (Qi et al. 2024, section 3.1), for one
stage per device. Three of its decisions may go either way (`TieBreak`), which makes eight forms;
all of them are tried. Another switch may be added there.

This file counts the times of a task when it adds the task to a list. `order_course.py` counts the
times of a complete order. A test compares the two (tests/planners/joint/test_order_rounds.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import le
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.joint.order_loads import Loads


class TieBreak(NamedTuple):
    """The switches of the heuristic, for decisions where either answer may be better.

    Attributes:
        late: whether the forwards before the first backward may delay that backward.
        hurries: whether a device skips a forward that would delay its own next backward.
        fills: whether W fills a gap that is too short for it even if the gap is within the slack.
    """

    late: bool
    hurries: bool
    fills: bool


RULES = tuple(TieBreak(*switches) for switches in product((False, True), repeat=3))


@dataclass
class _DeviceRounds:
    """The state of a device.

    `late` counts the second halves that are left for later. `ends_s` are the ends of its forwards
    (F) and of its backwards, whole or first halves (I), in the order of micro-batches.
    """

    end_s: float = 0.0
    idle_s: float = 0.0
    held_bytes: float = 0.0
    late: int = 0
    ends_s: dict[Kind, list[float]] = field(default_factory=lambda: {Kind.F: [], Kind.I: []})
    tasks: list[Task] = field(default_factory=list)

    def done(self, kind: Kind) -> int:
        """Returns how many tasks of a kind have run, which is the next one's micro-batch."""
        if kind is Kind.W:
            return self.done(Kind.I) - self.late
        return len(self.ends_s[kind])


class Rounds:
    """One run of the heuristic; its `order` is None if the forwards do not fit the rooms.

    Args:
        loads: of the plan's stages, one on each device.
        rooms_bytes: the bytes that micro-batches in flight may hold on each device.
        rule: the switches of the heuristic.
    """

    def __init__(
        self,
        loads: Loads,
        rooms_bytes: Sequence[float],
        rule: TieBreak,
    ) -> None:
        self._loads = loads
        self._rooms = rooms_bytes
        self._rule = rule
        self._stages = range(loads.devices)
        self._devices = [_DeviceRounds() for _ in self._stages]
        self.order: TaskLists | None = None
        if not all(map(le, loads.kept_bytes, rooms_bytes)):
            return
        self._begin()
        if all(self._round() for _ in range(1, loads.microbatches)):
            for s in self._stages:
                self._finish(s)
            self.order = tuple(tuple(device.tasks) for device in self._devices)

    def _begin(self) -> None:
        """Runs on each device the forwards before its first backward, and then that backward."""
        for s in self._stages:
            self._take(s, Kind.F)
        for s, more in enumerate(self._before_backward()):
            for _ in range(more):
                self._take(s, Kind.F)
        for s in reversed(self._stages):
            self._take(s, Kind.I)

    def _before_backward(self) -> list[int]:
        """Counts for each device the forwards after its first one and before its first backward.

        A device takes fewer forwards than the device before it, which makes its inputs, or none if
        that device takes none. If the device before runs all its forwards first, there is no such
        limit.
        """
        loads = self._loads
        more = [0] * loads.devices
        ready_s = 0.0
        for s in reversed(self._stages):
            device = self._devices[s]
            arrives_s = ready_s + loads.send_s[s] - loads.early_s[s]
            taking_s = loads.seconds[Kind.F][s]
            kept = loads.kept_bytes[s]
            end_s = device.end_s
            held_bytes = device.held_bytes
            # Devices are visited from the last to the first, so `ready_s` is when the next device
            # ends its first backward. Until its cotangents arrive, there is time for forwards.
            before_s = 0.0 if self._rule.late else taking_s
            while 1 + more[s] < loads.microbatches and held_bytes + kept <= self._rooms[s]:
                if end_s + before_s >= arrives_s:
                    break
                end_s += taking_s
                held_bytes += kept
                more[s] += 1
            backward_s = loads.seconds[self._first_half(s)][s]
            ready_s = max(end_s, arrives_s) + backward_s
        # A device cannot be as far ahead as the device that makes its inputs.
        for s in self._stages[1:]:
            if 1 + more[s - 1] < loads.microbatches:
                fewer = max(0, more[s - 1] - 1)
                more[s] = min(more[s], fewer)
        return more

    def _round(self) -> bool:
        """Runs a forward on some devices and a backward on all; False if a forward has no room."""
        loads = self._loads
        for s in self._stages[self._first_forwarding() :]:
            if self._devices[s].done(Kind.F) == loads.microbatches:
                continue
            if not self._make_room(s, loads.kept_bytes[s]):
                return False
            self._fill(s, Kind.F)
            self._take(s, Kind.F)
        for s in reversed(self._stages):
            if loads.splits[s]:
                self._make_room(s, loads.more_bytes[Kind.I][s])
            self._fill(s, Kind.I)
            if s == 0 and self._devices[0].done(Kind.F) == loads.microbatches:
                # No device waits for a backward of device 0, and device 0 has no forward left. So
                # each W that it has left may run now.
                self._finish(0)
            self._take(s, Kind.I)
        return True

    def _first_forwarding(self) -> int:
        """Finds the first device that runs a forward in a round; all devices after it do too.

        With `hurries`, a device that is at least two forwards ahead of the next one may skip its
        forward, to be in time for its backward. The devices before it then skip theirs too.
        """
        first = 0
        if not self._rule.hurries:
            return first
        for s in self._stages[:-1]:
            done = self._devices[s].done(Kind.F)
            following = self._devices[s + 1].done(Kind.F)
            is_ahead = done >= following + 2 and done != self._loads.microbatches
            if is_ahead and self._should_wait(s):
                first = s + 1
        return first

    def _should_wait(self, s: int) -> bool:
        """Tells whether a device should wait for its backward rather than take a forward now.

        It should if its backward could begin by now, or if the forward would delay the backward
        and the wait is within the device's slack.
        """
        loads = self._loads
        seconds = loads.seconds
        device = self._devices[s]
        following = self._devices[s + 1]
        # If the next device takes its own forward and backward now, this device can begin its
        # backward at `wanted_s`.
        backward = self._first_half(s + 1)
        wanted_s = following.end_s + seconds[Kind.F][s + 1] + loads.send_s[s]
        wanted_s += seconds[backward][s + 1] - loads.early_s[s]
        if device.end_s >= wanted_s:
            return True
        # If there is no room for the forward, some W have to run first.
        over = device.held_bytes + loads.kept_bytes[s] - self._rooms[s]
        handed = -loads.more_bytes[Kind.W][s]
        halves = min(device.late, -(-over // handed)) if over > 0 and handed else 0
        ends_s = device.end_s + seconds[Kind.F][s] + halves * seconds[Kind.W][s]
        idle_s = wanted_s - device.end_s
        return ends_s > wanted_s and idle_s <= self._slack_s(s)

    def _slack_s(self, s: int) -> float:
        """Counts how much longer the most idle device has been idle than device `s`."""
        return max(device.idle_s for device in self._devices) - self._devices[s].idle_s

    def _first_half(self, s: int) -> Kind:
        """Returns the kind of task that the device before waits for; B for an unsplit backward."""
        return Kind.I if self._loads.splits[s] else Kind.B

    def _make_room(self, s: int, more_bytes: float) -> bool:
        """Runs second halves until there is room for more bytes; tells whether there is room."""
        device = self._devices[s]
        while device.held_bytes + more_bytes > self._rooms[s] and device.late:
            self._take(s, Kind.W)
        return device.held_bytes + more_bytes <= self._rooms[s]

    def _fill(self, s: int, kind: Kind) -> None:
        """Runs second halves while a device waits for the input of its next task."""
        device = self._devices[s]
        half_s = self._loads.seconds[Kind.W][s]
        arrives_s = self._arrives_s(s, kind)
        while device.late and device.end_s + half_s <= arrives_s:
            self._take(s, Kind.W)
        # The gap that is left is too short for W. Within the slack, waiting is free; a longer gap
        # is filled, although W then delays the next task.
        gap_s = arrives_s - device.end_s
        fills = self._rule.fills or gap_s > self._slack_s(s)
        if device.late and gap_s > 0 and fills:
            self._take(s, Kind.W)

    def _finish(self, s: int) -> None:
        """Runs all second halves that a device has left."""
        while self._devices[s].late:
            self._take(s, Kind.W)

    def _arrives_s(self, s: int, kind: Kind) -> float:
        """Returns when a device's next task of a kind has its input, and may begin."""
        loads = self._loads
        m = self._devices[s].done(kind)
        if kind is Kind.F and s:
            return self._devices[s - 1].ends_s[kind][m] + loads.send_s[s - 1]
        if kind is Kind.I and s + 1 < loads.devices:
            sent_s = self._devices[s + 1].ends_s[kind][m]
            return sent_s + loads.send_s[s] - loads.early_s[s]
        return 0.0

    def _take(self, s: int, kind: Kind) -> None:
        """Runs a device's next task of a kind; a backward is whole if its halves have no room."""
        device = self._devices[s]
        loads = self._loads
        between = device.held_bytes + loads.more_bytes[Kind.I][s]
        splits = loads.splits[s] and between <= max(self._rooms[s], device.held_bytes)
        start_s = max(device.end_s, self._arrives_s(s, kind))
        run = Kind.B if kind is Kind.I and not splits else kind
        if device.tasks:
            device.idle_s += start_s - device.end_s
        device.end_s = start_s + loads.seconds[run][s]
        device.held_bytes += loads.more_bytes[run][s]
        device.tasks.append(Task(s, run, device.done(kind)))
        if kind is not Kind.W:
            device.ends_s[kind].append(device.end_s)
        device.late += KINDS[run].between


def in_rounds(loads: Loads, rooms_bytes: Sequence[float]) -> Iterator[TaskLists]:
    """Finds the orders of all eight forms of the heuristic that fit.

    Args:
        loads: of the plan's stages, one on each device.
        rooms_bytes: the bytes that micro-batches in flight may hold on each device.
    """
    orders = (Rounds(loads, rooms_bytes, rule).order for rule in RULES)
    return filter(None, orders)
