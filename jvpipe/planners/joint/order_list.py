"""Orders by list scheduling: whoever is free first takes what is ready, as long as there is room.

A device that is free takes a backward that is ready, else a forward that leaves room for the first
micro-batch that has not been forward through all of this device's stages, else the second half of a
backward, if that ends before the next thing is ready that it knows of, or nothing else can run. If
the halves of a backward have no room between them, it is whole. Its seconds are counted as tasks
are taken; a test holds them to the clock of `order_course.py`.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Loads, Order, Step

NEVER = float("inf")


@dataclass
class _Device:
    """What a device has done, and holds."""

    stages: list[int]
    cap_bytes: float
    unit_bytes: float
    free_s: float = 0.0
    held_bytes: float = 0.0
    steps: list[Step] = field(default_factory=list)
    late: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass
class _Way:
    """The forwards of all stages, or their backwards: each one's next micro-batch, and its arrival.

    `there` has a column more, for those that are through.
    """

    there: list[list[float]]
    next: list[int]

    @staticmethod
    def of(stages: int, microbatches: int) -> "_Way":
        there = [[NEVER] * (microbatches + 1) for _ in range(stages)]
        return _Way(there, [0] * stages)


class Listing:
    """One run of the list scheduler.

    Its `order` is None if a micro-batch alone is too large for a device.
    """

    def __init__(
        self,
        loads: Loads,
        cap_bytes: Sequence[float],
        patience: float,
        *,
        eager: bool = False,
        in_flight: Sequence[int] = (),
    ) -> None:
        """Runs at once.

        Args:
            loads: the plan's stages.
            cap_bytes: per device, what may be in flight.
            patience: for how much of a second half a device lets the next thing wait, as a share of
                its seconds.
            eager: whether a forward that is ready comes before a backward.
            in_flight: micro-batches that each stage may have in flight; none: as many as there is
                room for.
        """
        self.loads = loads
        self.patience = patience
        self.eager = eager
        stages = len(loads.places)
        self.most = in_flight or [loads.microbatches] * stages
        self.devices = list[_Device]()
        for d, cap in enumerate(cap_bytes):
            on = loads.stages_on(d)
            unit = sum(loads.kept_bytes[s] for s in on)
            self.devices.append(_Device(on, cap, unit))
        self.forward = _Way.of(stages, loads.microbatches)
        self.backward = _Way.of(stages, loads.microbatches)
        self.forward.there[0][:-1] = [0.0] * loads.microbatches
        self.links: dict[tuple[int, int], float] = {}
        self.queue = [(0.0, d) for d in range(len(self.devices))]
        # The queue holds when a device may have something to do; it may hold a device several
        # times. A turn while the device still works is skipped, as its end is in the queue too.
        while self.queue:
            now, d = heapq.heappop(self.queue)
            if self.devices[d].free_s <= now:
                self._turn(now, d)
        all_back = all(n == loads.microbatches for n in self.backward.next)
        is_whole = all_back and not any(device.late for device in self.devices)
        steps = [device.steps for device in self.devices]
        self.order: Order | None = steps if is_whole else None

    def _turn(self, now: float, d: int) -> None:
        device = self.devices[d]
        backward, following = self._first_backward(device, now)
        forward, arrival = self._first_forward(device, now)
        if backward is not None and not (self.eager and forward):
            kind = self._half_or_whole(device, backward[0])
            task = device.late.popleft() if kind is Kind.W else backward
            self._run(now, d, kind, *task)
            return
        if forward is not None:
            self._run(now, d, Kind.F, *forward)
            return
        following = min(following, arrival)
        # Nothing is ready: a second half may fill the gap, if it ends in time or the device has
        # patience.
        if device.late:
            s, _ = device.late[0]
            impatient_s = (1 - self.patience) * self.loads.seconds[Kind.W][s]
            if following == NEVER or now + impatient_s <= following:
                self._run(now, d, Kind.W, *device.late.popleft())
                return
        if following < NEVER:
            heapq.heappush(self.queue, (following, d))

    def _half_or_whole(self, device: _Device, s: int) -> Kind:
        """Picks I where W may come later; W of another if that makes room for I; else B."""
        if s == 0 or not self.loads.splits[s]:
            return Kind.B
        between = device.held_bytes + self.loads.handed_bytes[s] - self.loads.kept_bytes[s]
        if between <= max(device.cap_bytes, device.held_bytes):
            return Kind.I
        return Kind.W if device.late else Kind.B

    def _first_backward(
        self,
        device: _Device,
        now: float,
    ) -> tuple[tuple[int, int] | None, float]:
        """Picks the ready backward of the first micro-batch and its last stage.

        If none is ready, it returns when one is.
        """
        first = None
        following = NEVER
        way = self.backward
        for s in device.stages:
            m = way.next[s]
            arrives = way.there[s][m]
            following = min(following, arrives)
            if arrives <= now and (first is None or m <= first[1]):
                first = s, m
        return first, following

    def _first_forward(
        self,
        device: _Device,
        now: float,
    ) -> tuple[tuple[int, int] | None, float]:
        """Picks the ready forward of the last stage that has room.

        If none is ready, it returns when one is.
        """
        following = NEVER
        way = self.forward
        for s in reversed(device.stages):
            m = way.next[s]
            arrives = way.there[s][m]
            if arrives < following and self._room(device, s, m):
                if arrives <= now:
                    return (s, m), arrives
                following = arrives
        return None, following

    def _room(self, device: _Device, s: int, m: int) -> bool:
        """Tells whether a forward leaves room for those before it.

        What is forward on all devices ends by itself.
        """
        kept = self.loads.kept_bytes
        nexts = self.forward.next
        ended = self.backward.next
        is_full = nexts[s] - ended[s] >= self.most[s]
        if is_full or device.held_bytes + kept[s] > device.cap_bytes:
            return False
        first = min(nexts[stage] for stage in device.stages)  # of those that are not whole
        if m == first:
            return True
        # What is in flight behind the first micro-batch stays. The first one may come to hold a
        # unit on its way through the other stages, and frees it by itself.
        later = kept[s] + device.unit_bytes
        for stage in device.stages:
            behind_first = nexts[stage] - max(first + 1, ended[stage])
            later += max(0, behind_first) * kept[stage]
        return later <= device.cap_bytes

    def _run(
        self,
        now: float,
        d: int,
        kind: Kind,
        s: int,
        m: int,
    ) -> None:
        loads = self.loads
        device = self.devices[d]
        kept = loads.kept_bytes[s]
        handed = loads.handed_bytes[s]
        device.steps.append((kind, s, m))
        device.free_s = end = now + loads.seconds[kind][s]
        heapq.heappush(self.queue, (end, d))
        if kind is Kind.W:
            device.held_bytes -= handed
            return
        forward = kind is Kind.F
        last = len(loads.places) - 1
        (self.forward if forward else self.backward).next[s] += 1
        device.held_bytes += kept if forward else -kept
        if kind is Kind.I:
            device.held_bytes += handed
            device.late.append((s, m))
        # The last stage's backward follows its forward; a forward goes on, a backward goes back.
        turns = forward and s == last
        to = s if turns else s + 1 if forward else s - 1
        if to < 0:
            return
        e = loads.places[to]
        takes = loads.send_s[s] if forward else loads.return_s[s]
        arrives = end
        if e != d and takes:
            arrives = max(end, self.links.get((d, e), 0.0)) + takes
            self.links[d, e] = arrives
        goes_on = forward and not turns
        if not goes_on:  # it begins with what it computes again
            arrives = max(now, arrives - loads.early_s[to])
        way = self.forward if goes_on else self.backward
        way.there[to][m] = arrives
        ready = max(arrives, self.devices[e].free_s)
        heapq.heappush(self.queue, (ready, e))
