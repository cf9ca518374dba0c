"""Makes an order of tasks by list scheduling: a free device takes a task that is ready and fits.

F is a forward, B a whole backward, I and W the first and the second half of a backward. A task is
ready once its input has arrived. A free device takes the first of these that it can:

1. A backward that is ready.
2. A forward that is ready, if enough room is left afterwards: the oldest micro-batch with forwards
   still to run on this device must be able to run them all. Otherwise later micro-batches could
   fill the device, and the oldest one could never free its bytes.
3. The W of an earlier backward, if that W ends before the next task is ready, or if it is not yet
   known when another task will be ready.

A backward of the first stage runs whole, and so does a backward that cannot be split. Any other
backward runs whole only if what its I hands to its W would not fit, and no earlier W is left that
could make room.

A micro-batch passes S stages in 2 S hops: hop s is the forward on stage s, and hop 2 S - 1 - s is
the backward there, so the index of the latter is also -1 - s. The result of a hop is the input of
the next one.

Tasks are listed as they run, so devices that follow the lists never wait for each other in a
circle. With `eager`, forwards come before backwards.

This file counts the times of a task when it adds the task to a list. `order_course.py` counts the
times of a complete order. A test compares the two (tests/planners/joint/test_order_list.py).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.joint.order_loads import Loads

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
    tasks: list[Task] = field(default_factory=list)
    late: deque[tuple[int, int]] = field(default_factory=deque)


class Listing:
    """One run of the list scheduler.

    `order` is the order of tasks; None if some tasks could not run because a device had no room.
    """

    def __init__(
        self,
        loads: Loads,
        cap_bytes: Sequence[float],
        *,
        eager: bool = False,
        in_flight: Sequence[int] = (),
    ) -> None:
        """Runs the scheduler.

        Args:
            loads: of the plan's stages.
            cap_bytes: for each device, the bytes that micro-batches in flight may hold.
            eager: whether a forward that is ready comes before a backward that is ready.
            in_flight: the most micro-batches in flight on each stage; empty: as many as fit.
        """
        self.loads = loads
        self.eager = eager
        stages = len(loads.places)
        self.most = in_flight or [loads.microbatches] * stages
        each = enumerate(zip(cap_bytes, loads.unit_bytes, strict=True))
        self.devices = [_Device(loads.stages_on(d), cap, unit) for d, (cap, unit) in each]
        M = loads.microbatches
        self.next = [0] * (2 * stages)  # by hop: the next micro-batch
        # By hop and micro-batch: when the input arrives. Micro-batch M is there so that `next`, once
        # all have run, needs no test.
        self.there = [[NEVER] * (M + 1) for _ in self.next]
        self.there[0][:M] = [0.0] * M
        self.links: dict[tuple[int, int], float] = {}
        self.queue = [(0.0, d) for d in range(len(self.devices))]
        # An entry of the queue is a time at which a device may find something to do. An entry whose
        # device still works at that time is skipped, because the end of that work is an entry too.
        # The loop ends, because the number of tasks is finite: a task adds at most two entries,
        # and any other entry is for a time at which a task can run.
        while self.queue:
            now, d = heapq.heappop(self.queue)
            if self.devices[d].free_s <= now:
                self._turn(now, d)
        all_back = self.next[-1] == loads.microbatches
        any_late = any(device.late for device in self.devices)
        self.order: TaskLists | None = None
        if all_back and not any_late:
            self.order = tuple(tuple(device.tasks) for device in self.devices)

    def _turn(self, now: float, d: int) -> None:
        """Gives a free device its next task, or an entry in the queue for when it may have one."""
        device = self.devices[d]
        # The backward is the ready one with the lowest micro-batch. The forward is the one on the
        # last stage whose forward is ready and has room. If neither exists, `following` is the
        # earliest time at which a task will be ready, as far as known.
        backward = forward = None
        following = NEVER
        halves_s = self.loads.seconds[Kind.W]
        for s in reversed(device.stages):  # if micro-batches are equal, the last stage is picked
            m = self.next[-1 - s]
            arrives = self.there[-1 - s][m]
            following = min(following, arrives)
            if arrives <= now and (backward is None or m < backward[1]):
                backward = s, m
            m = self.next[s]
            arrives = self.there[s][m]
            if forward is None and arrives < NEVER and self._room(device, s, m):
                following = min(following, arrives)
                if arrives <= now:
                    forward = s, m
        if forward and (self.eager or not backward):
            self._run(now, d, Kind.F, *forward)
        elif backward:
            kind = self._half_or_whole(device, backward[0])
            task = device.late.popleft() if kind is Kind.W else backward
            self._run(now, d, kind, *task)
        elif device.late and now + halves_s[device.late[0][0]] <= following:  # a W fills the gap
            self._run(now, d, Kind.W, *device.late.popleft())
        elif following < NEVER:
            heapq.heappush(self.queue, (following, d))

    def _half_or_whole(self, device: _Device, s: int) -> Kind:
        """Picks the task that runs if a backward is ready: its I, if what I hands to W fits.

        If that does not fit, the W of an earlier backward runs, which makes room. If no W is left,
        B runs. B always runs on the first stage, and on stages whose backwards cannot be split.
        """
        if s == 0 or not self.loads.splits[s]:
            return Kind.B
        between = device.held_bytes + self.loads.more_bytes[Kind.I][s]
        if between <= max(device.cap_bytes, device.held_bytes):
            return Kind.I
        return Kind.W if device.late else Kind.B

    def _room(
        self,
        device: _Device,
        s: int,
        m: int,
    ) -> bool:
        """Tells whether a forward fits and leaves room for the first micro-batch not yet through.

        A micro-batch is through once its forwards on all stages of this device ran. After that it
        needs no more room here: only its backwards are left, which free what it holds.
        """
        kept = self.loads.kept_bytes
        nexts = self.next
        is_full = m - nexts[-1 - s] >= self.most[s]
        if is_full or device.held_bytes + kept[s] > device.cap_bytes:
            return False
        first = min(nexts[stage] for stage in device.stages)  # the first not yet through
        if m == first:
            return True
        # At worst, all later micro-batches keep what they hold until the first one is through, and
        # the first one comes to hold a whole unit. All of this has to fit together.
        later = kept[s] + device.unit_bytes
        for stage in device.stages:
            behind_first = nexts[stage] - max(first + 1, nexts[-1 - stage])
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
        """Runs a task, counts what its device then holds, and records when its result arrives."""
        loads = self.loads
        device = self.devices[d]
        device.tasks.append(Task(s, kind, m))
        device.held_bytes += loads.more_bytes[kind][s]
        device.free_s = end = now + loads.seconds[kind][s]
        heapq.heappush(self.queue, (end, d))
        if kind is Kind.W:
            return
        if kind is Kind.I:
            device.late.append((s, m))
        last = len(self.next) - 1
        hop = s if kind is Kind.F else last - s
        self.next[hop] += 1
        if hop == last:
            return
        after = hop + 1
        to = min(after, last - after)  # the stage of the next hop
        e = loads.places[to]
        arrives = end
        if takes_s := loads.send_s[min(s, to)]:
            arrives = max(end, self.links.get((d, e), 0.0)) + takes_s
            self.links[d, e] = arrives
        if to == last - after:  # a backward may recompute before its cotangents arrive
            arrives = max(now, arrives - loads.early_s[to])
        self.there[after][m] = arrives
        ready = max(arrives, self.devices[e].free_s)
        heapq.heappush(self.queue, (ready, e))
