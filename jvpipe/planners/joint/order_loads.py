"""What an order of tasks is chosen for: seconds and bytes per stage.

Its counts are short forms, for orders are judged by the thousand. Tests hold its bytes to
`device_bytes` (tests/planners/joint/test_order_loads.py), and its bound to the clock of orders
(test_order_course.py there).

Legend: a step is a tuple (kind, stage, micro-batch) as `Task` has them, but plain; an order has a
list of steps per device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import sub

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, stage_cost

STEP_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
Step = tuple[Kind, int, int]
Order = list[list[Step]]


@dataclass(frozen=True)
class Loads:
    """A plan's stages for orders, in the order of the forward.

    B and I include what is computed again before them; with `early_s` of that they begin before
    their cotangents are there. Devices end with their updates.

    Sends take no time between stages on one device. `room_bytes` is what each device has for
    micro-batches in flight, infinite without a limit, if that many are `in_flight` on each stage:
    `early` are a stage, the one that makes a value for it, and its bytes, which lie there once for
    each micro-batch that is in flight on that one and not yet on this one. `splits` says whose
    backwards may run in two halves.
    """

    places: tuple[int, ...]
    microbatches: int
    seconds: dict[Kind, tuple[float, ...]]
    send_s: tuple[float, ...]
    return_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    handed_bytes: tuple[float, ...]
    room_bytes: tuple[float, ...]
    splits: tuple[bool, ...]
    in_flight: tuple[int, ...]
    early: tuple[tuple[int, int, int], ...]
    early_s: tuple[float, ...]
    update_s: tuple[float, ...]

    @staticmethod
    def of(problem: Problem, decision: Decision) -> "Loads":
        """Counts the loads of a plan.

        Args:
            problem: whose schedule says how many micro-batches are in flight.
            decision: the plan.
        """
        spans = pairwise(decision.bounds)
        stages = [stage_cost(problem, s, i, j, decision.choices) for s, (i, j) in enumerate(spans)]
        places = problem.places
        # Half of what two stages exchange goes each way; on one device nothing has to go.
        ways_s = list[float]()
        for s in range(1, len(stages)):
            is_near = places[s] == places[s - 1]
            ways_s.append(0.0 if is_near else stages[s].comm_s / 2)
        is_limited = problem.memory_limit_bytes is not None
        early = _early(problem, decision.bounds) if is_limited else ()
        return Loads(
            places=places,
            microbatches=problem.microbatches,
            seconds={kind: tuple(stage.task_s(kind) for stage in stages) for kind in STEP_KINDS},
            send_s=(*ways_s, 0.0),
            return_s=(0.0, *ways_s),
            kept_bytes=tuple(float(x.held.kept + x.held.swapped) for x in stages),
            handed_bytes=tuple(float(x.held.handed) for x in stages),
            room_bytes=_room_bytes(problem, stages),
            splits=tuple(x.halves_s[1] > 0 for x in stages),
            in_flight=problem.in_flight,
            early=tuple(early),
            early_s=tuple(x.early_s for x in stages),
            update_s=tuple(x.update_s for x in stages),
        )

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.room_bytes)

    def stages_on(self, d: int) -> list[int]:
        """Lists the stages of a device, in the order of the forward."""
        return [s for s, place in enumerate(self.places) if place == d]

    def updates_s(self, d: int) -> float:
        """Counts the seconds of a device's updates, behind all its steps."""
        return sum((self.update_s[s] for s in self.stages_on(d)), 0.0)

    def peak_bytes(self, steps: Sequence[Step]) -> float:
        """Counts the most that micro-batches in flight hold on a device that takes these steps."""
        now_bytes = peak = 0.0
        for kind, s, _ in steps:
            now_bytes += self._more_bytes[kind][s]
            peak = max(peak, now_bytes)
        return peak

    @cached_property
    def _more_bytes(self) -> dict[Kind, list[float]]:
        """Counts how many more bytes a device holds after a task of each kind that it can run."""
        kept, handed = self.kept_bytes, self.handed_bytes
        return {
            Kind.F: list(kept),
            Kind.B: [-size for size in kept],
            Kind.I: list(map(sub, handed, kept)),
            Kind.W: [-size for size in handed],
        }

    def over_bytes(self, order: Order) -> list[float]:
        """Counts by how much each device exceeds its room under an order; below 0 if it fits."""
        rooms = zip(order, self.rooms_bytes(order), strict=True)
        return [self.peak_bytes(steps) - room for steps, room in rooms]

    def fits(self, order: Order) -> bool:
        """Tells whether each device has room for what is in flight."""
        if min(self.room_bytes) == float("inf"):
            return True
        return max(self.over_bytes(order)) <= 0

    def rooms_bytes(self, order: Order) -> list[float]:
        """Counts what each device has for micro-batches in flight under an order."""
        rooms = list(self.room_bytes)
        k = self._most_in_flight(order) if self.early else []
        # The room was counted for the lists in the problem. With fewer micro-batches between maker
        # and reader, fewer early values lie on the reader, and there is more room.
        for s, maker, size in self.early:
            before = self.in_flight[maker] - self.in_flight[s]
            now = k[maker] - k[s]
            rooms[self.places[s]] += (before - now) * size
        return rooms

    def _most_in_flight(self, order: Order) -> list[int]:
        """Counts the most micro-batches that each stage has in flight under an order."""
        peaks = [0] * len(self.places)
        now = [0] * len(self.places)
        for steps in order:
            for kind, s, _ in steps:
                now[s] += KINDS[kind].in_flight
                peaks[s] = max(peaks[s], now[s])
        return peaks

    def bound_s(self) -> float:
        """Bounds any order: a device's work, from the arrival of its first micro-batch."""
        arrived_s = 0.0
        first_s = dict[int, float]()  # when a device's first micro-batch can be there
        works_s = [0.0] * self.devices  # of each micro-batch
        for s, place in enumerate(self.places):
            forward_s = self.seconds[Kind.F][s]
            backward_s = self.seconds[Kind.B][s]
            if self.splits[s]:
                halves_s = self.seconds[Kind.I][s] + self.seconds[Kind.W][s]
                backward_s = min(backward_s, halves_s)
            # A device is idle until its first micro-batch is there, and then works for all of them
            # at best.
            first_s.setdefault(place, arrived_s)
            works_s[place] += forward_s + backward_s
            arrived_s += forward_s + self.send_s[s]
        ends_s = []
        for d, begin_s in first_s.items():
            work_s = self.microbatches * works_s[d]
            ends_s.append(begin_s + work_s + self.updates_s(d))
        return max(ends_s)


def _room_bytes(problem: Problem, stages: Sequence[StageCost]) -> tuple[float, ...]:
    """Counts what each device has for micro-batches in flight: its limit less what is fixed."""
    rooms = list[float]()
    for d in range(problem.devices):
        limit = problem.limit_of(d)
        if limit is None:
            rooms.append(float("inf"))
            continue
        here = [stages[s].held for s, place in enumerate(problem.places) if place == d]
        # One stage of a device works at a time, so that they share what they need beyond.
        beyond = max(stage.beyond for stage in here)
        fixed = sum(stage.static for stage in here) + beyond
        rooms.append(float(limit - fixed))
    return tuple(rooms)


def _early(problem: Problem, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the values that `waiting_bytes` counts: its reader, its maker (stages), its bytes."""
    for s, (i, j) in enumerate(pairwise(bounds)):
        for edge in problem.costs.edges_at(i, j):
            is_read = any(i <= reader < j for reader in edge.readers)
            if edge.producer < i and is_read:
                # Each stage has a layer at least, so that the maker is at most so far away.
                away = i - edge.producer
                yield s, max(0, s - away), edge.bytes


def order_of(lists: TaskLists) -> Order:
    """Converts task lists to an order."""
    return [[(task.kind, task.stage, task.microbatch) for task in tasks] for tasks in lists]


def order_lists(order: Order) -> TaskLists:
    """Converts an order to task lists."""
    return tuple(tuple(Task(s, kind, m) for kind, s, m in steps) for steps in order)
