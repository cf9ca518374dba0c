"""Orders by list scheduling: the device that is free first takes a task that is ready and fits.

A device that is free takes the first of these that it can:

1. A backward that is ready.
2. A forward that is ready and leaves room. The room is for the first micro-batch whose forwards on
   this device's stages did not all run: without it, the device could block itself.
3. The second half of a backward, if it ends before the next task that the device knows of is ready,
   or if no other task is to come.

A backward is whole if its two halves would not fit. Times are counted as tasks are taken; a test
compares them with those of `order_course.py`.
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
    """The state of a device: its tasks so far, what it holds, and its second halves left for later.

    `cap_bytes` is its room, `unit_bytes` what one micro-batch holds on all of its stages.
    """

    stages: list[int]
    cap_bytes: float
    unit_bytes: float
    free_s: float = 0.0
    held_bytes: float = 0.0
    steps: list[Step] = field(default_factory=list)
    late: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass
class _Way:
    """The forwards of all stages, or their backwards: next micro-batches, and arrivals of inputs.

    `next[s]` is the next micro-batch of stage s. `there[s][m]` is when the input of micro-batch m
    arrives at stage s; a last column stays `NEVER`, for stages that have no micro-batch left.
    """

    there: list[list[float]]
    next: list[int]

    @staticmethod
    def of(stages: int, microbatches: int) -> "_Way":
        there = [[NEVER] * (microbatches + 1) for _ in range(stages)]
        return _Way(there, [0] * stages)


class Listing:
    """One run of the list scheduler.

    Its `order` is None if not all tasks could run, because micro-batches are too large for a room.
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
        """Runs the scheduler.

        Args:
            loads: of the plan's stages.
            cap_bytes: for each device, the bytes that micro-batches in flight may hold.
            patience: for how long a second half may delay the next task, as a share of the second
                half's seconds.
            eager: whether a forward that is ready comes before a backward.
            in_flight: micro-batches that each stage may have in flight; empty: as many as fit.
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
        # The queue has times at which a device may have something to do, and may have a device
        # several times. A turn while the device still works is skipped, because the time at which
        # it becomes free is in the queue too.
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
        # Nothing is ready. A second half may fill the gap if it ends in time, or late by no more
        # than patience allows.
        if device.late:
            s, _ = device.late[0]
            impatient_s = (1 - self.patience) * self.loads.seconds[Kind.W][s]
            if following == NEVER or now + impatient_s <= following:
                self._run(now, d, Kind.W, *device.late.popleft())
                return
        if following < NEVER:
            heapq.heappush(self.queue, (following, d))

    def _half_or_whole(self, device: _Device, s: int) -> Kind:
        """Picks I if its W can come later, W of an earlier backward if that makes room, else B."""
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
        """Picks the ready backward of the lowest micro-batch, and of equals the last stage's.

        Also returns the earliest time at which a backward of this device is ready; `NEVER` if none
        is known.
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

        Also returns the earliest time at which a forward that has room is ready; `NEVER` if none is
        known.
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
        """Tells whether a forward leaves room for the first micro-batch that is not through.

        A micro-batch is through once its forwards on all stages of this device ran. What a device
        holds of such micro-batches is freed by their backwards, without further forwards here.
        """
        kept = self.loads.kept_bytes
        nexts = self.forward.next
        ended = self.backward.next
        is_full = nexts[s] - ended[s] >= self.most[s]
        if is_full or device.held_bytes + kept[s] > device.cap_bytes:
            return False
        first = min(nexts[stage] for stage in device.stages)  # the first that is not through
        if m == first:
            return True
        # Later micro-batches keep what they hold until the first is through. The first one may come
        # to hold a unit on the way, and its own backwards free it.
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
        # A forward goes on to the next stage, a backward to the stage before; the last stage's
        # forward is followed by its own backward.
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
        if not goes_on:  # a backward may begin earlier with what it recomputes
            arrives = max(now, arrives - loads.early_s[to])
        way = self.forward if goes_on else self.backward
        way.there[to][m] = arrives
        ready = max(arrives, self.devices[e].free_s)
        heapq.heappush(self.queue, (ready, e))
