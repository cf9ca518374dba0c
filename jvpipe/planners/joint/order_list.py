"""Makes an order of tasks by list scheduling: a free device takes a task that is ready and fits.

F is a forward, B a whole backward, I and W the first and the second half of a backward. A task is
ready once its input has arrived. A free device takes the first of these that it can:

1. A backward that is ready.
2. A forward that is ready, if enough room is left afterwards: the oldest micro-batch with forwards
   still to run on this device must be able to run them all. Otherwise later micro-batches could
   fill the device, and the oldest one could never free its bytes.
3. The W of an earlier backward, if that W ends before the next task is ready, or if the device
   does not know yet when another task will be ready.

A backward of the first stage runs whole, and so does a backward that cannot be split. Any other
runs whole only if what its I hands to its W would not fit, and no earlier W is left to make room.

Tasks are listed as they run, so devices that follow the lists never wait for each other in a
circle. The caller may vary the rules: `eager` puts forwards first, and with `patience` a W may
delay the next task.

Times are counted as tasks are taken. `order_course.py` counts those of a complete order; a test
compares both (tests/planners/joint/test_order_list.py).
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
    """The state of a device: its tasks so far, what it holds, and each W left for later (`late`).

    `cap_bytes` is the most that micro-batches may hold on the device. `unit_bytes` is what one
    micro-batch holds if it is in flight on all stages of the device.
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
    """One direction, all forwards or all backwards: the next micro-batches, and when inputs arrive.

    `next[s]` is the next micro-batch of stage s. `there[s][m]` is when the input of micro-batch m
    arrives at stage s; `NEVER` if that is not known yet. A further column stays `NEVER`, so that a
    stage without a micro-batch left is never ready.
    """

    there: list[list[float]]
    next: list[int]

    @staticmethod
    def of(stages: int, microbatches: int) -> "_Way":
        there = [[NEVER] * (microbatches + 1) for _ in range(stages)]
        return _Way(there, [0] * stages)


class Listing:
    """One run of the list scheduler.

    `order` is the order of tasks; None if some tasks could not run because a device had no room.
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
            patience: for how long a W may delay the next task, as a share of the seconds of W.
            eager: whether a forward that is ready comes before a backward that is ready.
            in_flight: the most micro-batches in flight on each stage; empty: as many as fit.
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
        # An entry of the queue is a time at which a device may find something to do. An entry whose
        # device still works at that time is skipped, because the end of that work is an entry too.
        while self.queue:
            now, d = heapq.heappop(self.queue)
            if self.devices[d].free_s <= now:
                self._turn(now, d)
        all_back = all(n == loads.microbatches for n in self.backward.next)
        is_whole = all_back and not any(device.late for device in self.devices)
        steps = [device.steps for device in self.devices]
        self.order: Order | None = steps if is_whole else None

    def _turn(self, now: float, d: int) -> None:
        """Gives a free device its next task, or an entry in the queue for when it may have one."""
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
        # No forward and no backward is ready. A W may fill the gap until `following`, or end later
        # by no more than `patience` allows.
        if device.late:
            s, _ = device.late[0]
            impatient_s = (1 - self.patience) * self.loads.seconds[Kind.W][s]
            if following == NEVER or now + impatient_s <= following:
                self._run(now, d, Kind.W, *device.late.popleft())
                return
        if following < NEVER:
            heapq.heappush(self.queue, (following, d))

    def _half_or_whole(self, device: _Device, s: int) -> Kind:
        """Picks the task that runs if a backward is ready: its I, if what that hands to its W fits.

        If not, it is the W of an earlier backward, which makes room, or B if no W was left. It is
        always B if the stage is the first, or if its backwards cannot be split.
        """
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
        """Picks the ready backward of the lowest micro-batch, on the last stage that has it ready.

        Also returns the earliest time at which any backward of this device is ready; `NEVER` if no
        such time is known.
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
        """Picks a ready forward that has room, on the last stage that has one.

        Also returns the earliest time at which a forward that has room is ready; `NEVER` if no such
        time is known.
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
        """Tells whether a forward fits and leaves room for the first micro-batch not yet through.

        A micro-batch is through once its forwards on all stages of this device ran. After that it
        needs no more room here: only its backwards are left, which free what it holds.
        """
        kept = self.loads.kept_bytes
        nexts = self.forward.next
        ended = self.backward.next
        is_full = nexts[s] - ended[s] >= self.most[s]
        if is_full or device.held_bytes + kept[s] > device.cap_bytes:
            return False
        first = min(nexts[stage] for stage in device.stages)  # the first not yet through
        if m == first:
            return True
        # At worst, all later micro-batches keep what they hold until the first one is through, and
        # the first one comes to hold a whole unit. All of this has to fit together.
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
        """Runs a task, counts what its device holds then, and notes when its result arrives."""
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
