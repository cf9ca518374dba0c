"""Orders by list scheduling: whoever is free first takes what is ready, as long as there is room.

A device that is free takes a backward that is ready, else a forward that leaves room for the first micro-batch that has
not been forward through all of this device's stages, else the second half of a backward, if that ends before the next
thing is ready that it knows of, or nothing else can run. Where there is no room between the halves of a backward, it is
whole.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Loads, Order, Step

Key = tuple[int, int, bool]  # a stage, a micro-batch, and whether it is a forward


@dataclass
class _Device:
    """What a device has done, and holds."""

    stages: list[int]
    cap_bytes: float
    free_s: float = 0.0
    held_bytes: float = 0.0
    steps: list[Step] = field(default_factory=list)
    late: deque[tuple[int, int]] = field(default_factory=deque)


class Listing:
    """One run of the list scheduler; `order` is None if a micro-batch alone is too large for a device."""

    def __init__(self, loads: Loads, cap_bytes: Sequence[float], patience: float) -> None:
        """Runs at once.

        Args:
            loads: the plan's stages.
            cap_bytes: per device, what may be in flight.
            patience: for how much of a second half a device lets the next thing wait, as a share of its seconds.
        """
        self.loads, self.patience = loads, patience
        self.devices = [_Device(loads.stages_on(d), cap) for d, cap in enumerate(cap_bytes)]
        self.next = {True: [0] * len(loads.places), False: [0] * len(loads.places)}
        self.there: dict[Key, float] = {(0, m, True): 0.0 for m in range(loads.microbatches)}
        self.links: dict[tuple[int, int], float] = {}
        self.queue = [(0.0, d) for d in range(len(self.devices))]
        while self.queue:
            now, d = heapq.heappop(self.queue)
            if self.devices[d].free_s <= now:
                self._turn(now, d)
        whole = all(n == loads.microbatches for n in self.next[False]) and not any(x.late for x in self.devices)
        self.order: Order | None = [x.steps for x in self.devices] if whole else None

    def _turn(self, now: float, d: int) -> None:
        device = self.devices[d]
        backward = self._first(device, now, forward=False)
        if backward is not None:
            kind = self._half_or_whole(device, backward[0])
            if kind is Kind.W:
                self._run(now, d, kind, *device.late.popleft())
            else:
                self._run(now, d, kind, *backward)
            return
        forward = self._first(device, now, forward=True)
        if forward is not None:
            self._run(now, d, Kind.F, *forward)
            return
        waits = [at for at in (self._arrival(device, forward=forward) for forward in (False, True)) if at is not None]
        following = min(waits, default=None)
        if device.late:
            seconds = self.loads.seconds[Kind.W][device.late[0][0]]
            if following is None or now + (1 - self.patience) * seconds <= following:
                self._run(now, d, Kind.W, *device.late.popleft())
                return
        if following is not None:
            heapq.heappush(self.queue, (following, d))

    def _half_or_whole(self, device: _Device, s: int) -> Kind:
        """I where W may come later; W of another one if that makes the room which I lacks; else B."""
        if s == 0 or not self.loads.splits[s]:
            return Kind.B
        between = device.held_bytes + self.loads.handed_bytes[s] - self.loads.kept_bytes[s]
        if between <= max(device.cap_bytes, device.held_bytes):
            return Kind.I
        return Kind.W if device.late else Kind.B

    def _ready(self, device: _Device, *, forward: bool) -> list[tuple[int, int]]:
        """The next micro-batch of each stage, if there is room for it."""
        M, nexts = self.loads.microbatches, self.next[forward]
        every = [(s, nexts[s]) for s in device.stages if nexts[s] < M]
        return [one for one in every if not forward or self._room(device, *one)]

    def _first(self, device: _Device, now: float, *, forward: bool) -> tuple[int, int] | None:
        ready = [
            (s, m) for s, m in self._ready(device, forward=forward) if self.there.get((s, m, forward), now + 1) <= now
        ]
        return min(ready, key=lambda one: (-one[0], one[1]) if forward else (one[1], -one[0]), default=None)

    def _arrival(self, device: _Device, *, forward: bool) -> float | None:
        known = [self.there.get((s, m, forward)) for s, m in self._ready(device, forward=forward)]
        return min((at for at in known if at is not None), default=None)

    def _room(self, device: _Device, s: int, m: int) -> bool:
        """Whether a forward leaves room for those before it: of these, what is forward everywhere ends by itself."""
        kept, nexts, ended = self.loads.kept_bytes, self.next[True], self.next[False]
        if device.held_bytes + kept[s] > device.cap_bytes:
            return False
        first = min(nexts[stage] for stage in device.stages)  # of those that are not whole
        if m == first:
            return True
        later = sum(max(0, nexts[stage] - max(first + 1, ended[stage])) * kept[stage] for stage in device.stages)
        return later + kept[s] + sum(kept[stage] for stage in device.stages) <= device.cap_bytes

    def _run(self, now: float, d: int, kind: Kind, s: int, m: int) -> None:
        loads, device = self.loads, self.devices[d]
        kept, handed = loads.kept_bytes[s], loads.handed_bytes[s]
        device.steps.append((kind, s, m))
        device.free_s = end = now + loads.seconds[kind][s]
        heapq.heappush(self.queue, (end, d))
        if kind is Kind.W:
            device.held_bytes -= handed
            return
        forward = kind is Kind.F
        self.next[forward][s] += 1
        device.held_bytes += kept if forward else -kept
        if kind is Kind.I:
            device.held_bytes += handed
            device.late.append((s, m))
        last = len(loads.places) - 1
        to = s if forward and s == last else s + 1 if forward else s - 1
        if to < 0:
            return
        e, takes = loads.places[to], (loads.send_s if forward else loads.return_s)[s]
        arrives = end
        if e != d and takes:
            arrives = max(end, self.links.get((d, e), 0.0)) + takes
            self.links[d, e] = arrives
        self.there[to, m, forward and s != last] = arrives
        heapq.heappush(self.queue, (max(arrives, self.devices[e].free_s), e))
