"""Orders in rounds of a forward and a backward per device; second halves fill the gaps.

    device 0    F F F F F      I F I F I W F I W ...         first as many forwards as there is
    device 1      F F F      I F I F I W F I W ...           time for before the first backward
    device 2        F      I F I F I F I W W ...
                           ^ the first backward; from here on in rounds

Devices are idle for unlike times. As long as one has been idle for less than the one that was idle
the longest, it may wait without making the step longer: so its second halves need not fill every
gap, and are there for gaps to come. This is the heuristic of Zero Bubble Pipeline Parallelism (Qi
et al. 2024, section 3.1), of one stage per device, in the eight forms that its `TieBreak` spans.

Its seconds are counted as tasks are taken; a test holds them to the clock of `order_course.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import le
from typing import NamedTuple

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Loads, Order, Step


class TieBreak(NamedTuple):
    """What is done where either may be better.

    Attributes:
        late: whether the forwards before the first backward may hold it up.
        hurries: whether a device leaves out a forward where the next one waits for its backward.
        fills: whether a second half fills a gap that it is too long for, though waiting costs
            nothing.
    """

    late: bool
    hurries: bool
    fills: bool


_KINDS = (Kind.F, Kind.I, Kind.W)
RULES = tuple(TieBreak(*switches) for switches in product((False, True), repeat=3))


@dataclass
class _Device:
    """What a device has done, and holds; it has done a kind of task for so many micro-batches."""

    end_s: float = 0.0
    idle_s: float = 0.0
    held_bytes: float = 0.0
    done: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    steps: list[Step] = field(default_factory=list)

    @property
    def late(self) -> int:
        """How many second halves it has left for later."""
        return self.done[Kind.I] - self.done[Kind.W]


class Rounds:
    """One run of the heuristic; `order` is None if it finds no room.

    Args:
        loads: the plan's stages, one on each device.
        rooms_bytes: what may be in flight on each device.
        rule: what is done where either may be better.
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
        self._count = loads.devices
        self._devices = [_Device() for _ in range(self._count)]
        tasks = product((Kind.F, Kind.I), range(self._count))
        self._ends_s = {task: [0.0] * loads.microbatches for task in tasks}
        fits = all(map(le, loads.kept_bytes, rooms_bytes))
        if fits:
            self._begin()
            fits = all(self._round() for _ in range(1, loads.microbatches))
        for s in range(self._count):
            self._finish(s)
        self.order: Order | None = [x.steps for x in self._devices] if fits else None

    def _begin(self) -> None:
        """Takes the forwards up to the first backward, and that."""
        for s in range(self._count):
            self._take(s, Kind.F)
        for s, more in enumerate(self._before_backward()):
            for _ in range(more):
                self._take(s, Kind.F)
        for s in reversed(range(self._count)):
            self._take(s, Kind.I)

    def _before_backward(self) -> list[int]:
        """Counts the extra forwards of each device before its first backward.

        Each takes fewer than the device before, which feeds it.
        """
        loads = self._loads
        more = [0] * self._count
        ready_s = 0.0
        for s in reversed(range(self._count)):
            device = self._devices[s]
            is_last = s + 1 == self._count
            return_s = 0.0 if is_last else loads.return_s[s + 1]
            arrives_s = ready_s + return_s - loads.early_s[s]
            taking_s = loads.seconds[Kind.F][s]
            kept = loads.kept_bytes[s]
            end_s = device.end_s
            held_bytes = device.held_bytes
            # From the last device to the first: the backward of the device after it says how long
            # this one would be idle, and so how many forwards there is time for.
            while 1 + more[s] < loads.microbatches and held_bytes + kept <= self._rooms[s]:
                needed_s = end_s if self._rule.late else end_s + taking_s
                if needed_s >= arrives_s:
                    break
                end_s = end_s + taking_s
                held_bytes = held_bytes + kept
                more[s] += 1
            backward_s = loads.seconds[self._first_half(s)][s]
            ready_s = max(end_s, arrives_s) + backward_s
        # A device cannot be as far ahead as the one that feeds it.
        for s in range(1, self._count):
            if 1 + more[s] < loads.microbatches:
                fewer = max(0, more[s - 1] - 1)
                more[s] = min(more[s], fewer)
        return more

    def _round(self) -> bool:
        """Takes a forward on the devices that are to have one, then a backward on each.

        Returns:
            Whether there was room for the forwards.
        """
        loads = self._loads
        for s in range(self._first_forwarding(), self._count):
            if self._devices[s].done[Kind.F] == loads.microbatches:
                continue
            if not self._make_room(s, loads.kept_bytes[s]):
                return False
            self._fill(s, Kind.F)
            self._take(s, Kind.F)
        for s in reversed(range(self._count)):
            if loads.splits[s]:
                self._make_room(s, loads.handed_bytes[s] - loads.kept_bytes[s])
            self._fill(s, Kind.I)
            if s == 0 and self._devices[0].done[Kind.F] == loads.microbatches:
                self._finish(0)  # nobody waits for its backwards, and all its forwards are done
            self._take(s, Kind.I)
        return True

    def _first_forwarding(self) -> int:
        """Finds the first device that takes a forward in a round; all after it do.

        One that is two forwards ahead may leave one out, where the next device would be ready for
        its backward before.
        """
        first = 0
        if not self._rule.hurries:
            return first
        for s in range(self._count - 1):
            done = self._devices[s].done[Kind.F]
            following = self._devices[s + 1].done[Kind.F]
            is_ahead = done >= following + 2 and done != self._loads.microbatches
            if is_ahead and self._is_awaited(s):
                first = s + 1
        return first

    def _is_awaited(self, s: int) -> bool:
        """Tells whether a forward now would hold up the device's next backward at a cost."""
        loads = self._loads
        seconds = loads.seconds
        device = self._devices[s]
        following = self._devices[s + 1]
        # When this device could begin its backward, if the next one takes its forward and backward
        # now.
        backward = self._first_half(s + 1)
        wanted_s = following.end_s + seconds[Kind.F][s + 1] + loads.return_s[s + 1]
        wanted_s += seconds[backward][s + 1] - loads.early_s[s]
        if device.end_s >= wanted_s:
            return True
        # Second halves make the room that the forward lacks.
        over = device.held_bytes + loads.kept_bytes[s] - self._rooms[s]
        handed = loads.handed_bytes[s]
        halves = min(device.late, -(-over // handed)) if over > 0 and handed else 0
        ends_s = device.end_s + seconds[Kind.F][s] + halves * seconds[Kind.W][s]
        idle_s = wanted_s - device.end_s
        return ends_s > wanted_s and idle_s <= self._slack_s(s)

    def _slack_s(self, s: int) -> float:
        """Counts how long a device may wait until it has been idle for as long as any."""
        return max(device.idle_s for device in self._devices) - self._devices[s].idle_s

    def _first_half(self, s: int) -> Kind:
        """Returns the kind of task that the device before waits for."""
        return Kind.I if self._loads.splits[s] else Kind.B

    def _make_room(self, s: int, more_bytes: float) -> bool:
        """Takes second halves until there is room for more; whether there is."""
        device = self._devices[s]
        while device.held_bytes + more_bytes > self._rooms[s] and device.late:
            self._take(s, Kind.W)
        return device.held_bytes + more_bytes <= self._rooms[s]

    def _fill(self, s: int, kind: Kind) -> None:
        """Takes second halves while a device waits for what its next task reads."""
        device = self._devices[s]
        half_s = self._loads.seconds[Kind.W][s]
        arrives_s = self._arrives_s(s, kind)
        while device.late and device.end_s + half_s <= arrives_s:
            self._take(s, Kind.W)
        # A second half that is longer than the gap holds up the task; that costs nothing as long as
        # another device has been idle for longer.
        gap_s = arrives_s - device.end_s
        if device.late and gap_s > 0:
            fills = self._rule.fills or gap_s > self._slack_s(s)
            if fills:
                self._take(s, Kind.W)

    def _finish(self, s: int) -> None:
        while self._devices[s].late:
            self._take(s, Kind.W)

    def _arrives_s(self, s: int, kind: Kind) -> float:
        """Counts when the input of a device's next task of a kind has arrived."""
        loads = self._loads
        m = self._devices[s].done[kind]
        if kind is Kind.F and s:
            sent_s = self._ends_s[Kind.F, s - 1][m]
            return sent_s + loads.send_s[s - 1]
        if kind is Kind.I and s + 1 < self._count:
            sent_s = self._ends_s[Kind.I, s + 1][m]
            return sent_s + loads.return_s[s + 1] - loads.early_s[s]
        return 0.0

    def _take(self, s: int, kind: Kind) -> None:
        """Runs a device's next task of a kind; without room for halves a backward is whole."""
        device = self._devices[s]
        loads = self._loads
        m = device.done[kind]
        kept = loads.kept_bytes[s]
        between = loads.handed_bytes[s] - kept
        room = max(self._rooms[s], device.held_bytes)
        splits = loads.splits[s] and device.held_bytes + between <= room
        start_s = max(device.end_s, self._arrives_s(s, kind))
        run = Kind.B if kind is Kind.I and not splits else kind
        if device.done[Kind.F]:
            device.idle_s += start_s - device.end_s
        device.end_s = start_s + loads.seconds[run][s]
        device.steps.append((run, s, m))
        device.done[kind] += 1
        match kind:
            case Kind.F:
                device.held_bytes += kept
            case Kind.I:
                device.held_bytes += between if splits else -kept
                device.done[Kind.W] += not splits
            case Kind.W:
                device.held_bytes -= loads.handed_bytes[s]
            case _:
                raise AssertionError(f"a round has no {kind}")
        if kind is not Kind.W:
            self._ends_s[kind, s][m] = device.end_s


def in_rounds(loads: Loads, rooms_bytes: Sequence[float]) -> Iterator[Order]:
    """Yields the orders of all rules that find room.

    Args:
        loads: the plan's stages, one on each device.
        rooms_bytes: what may be in flight on each device.
    """
    for rule in RULES:
        order = Rounds(loads, rooms_bytes, rule).order
        if order is not None:
            yield order
