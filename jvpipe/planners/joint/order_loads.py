"""Counts the loads of a plan: the data on its stages that a search for an order of tasks needs.

Loads are the seconds of each stage's tasks and transfers, and the bytes that micro-batches hold on
the stage. Given an order, they tell whether the order fits the devices. They also bound the seconds
of any order from below (`bound_s`).

Counts are kept simple, because thousands of orders are judged. Tests compare bytes with
`device_bytes` of `stage_cost.py` (tests/planners/joint/test_order_loads.py), and the bound with the
times of orders (test_order_course.py in the same folder).

An order, like a schedule, gives each device a list of tasks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import stage_cost

ORDERED_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Loads:
    """The loads of a plan's stages, in forward order; entries are per stage unless stated.

    Attributes:
        places: the device of each stage.
        microbatches: how many a training step has.
        seconds: for each kind of task, what it takes on each stage. B and I include what is
            recomputed before them.
        send_s: the seconds of sending values to the next stage, and of returning cotangents from
            there; 0 if that stage is on the same device, or if there is no next stage.
        more_bytes: for each kind of task, what it adds to the bytes that its device holds.
        room_bytes: per device, what micro-batches in flight may hold; infinite without a limit.
            It is exact for orders with `in_flight` micro-batches on each stage; for any other
            order, `rooms_bytes` corrects it.
        splits: whether backwards may run in two halves.
        in_flight: the most micro-batches in flight under the problem's schedule.
        early: values that arrive before the reading stage's forward, as (stage that reads, stage
            that makes, bytes). The reader holds the bytes once for each micro-batch that is in
            flight on the maker but not on the reader.
        early_s: the seconds of recomputation that may run before a backward's cotangents arrive.
        updates_s: per device, the seconds of its updates, which come after all of its tasks.
    """

    places: tuple[int, ...]
    microbatches: int
    seconds: dict[Kind, list[float]]
    send_s: list[float]
    more_bytes: dict[Kind, list[float]]
    room_bytes: list[float]
    splits: list[bool]
    in_flight: tuple[int, ...]
    early: Sequence[tuple[int, int, int]]
    early_s: list[float]
    updates_s: list[float]

    @staticmethod
    def of(problem: Problem, decision: Decision) -> "Loads":
        """Counts the loads of a plan.

        Args:
            problem: its schedule gives the micro-batches in flight.
            decision: the plan.
        """
        choices = decision.choices
        spans = enumerate(pairwise(decision.bounds))
        stages = [stage_cost(problem, s, i, j, choices) for s, (i, j) in spans]
        sizes = [stage.held for stage in stages]
        places = problem.places
        # `comm_s` counts both directions of the link before a stage, so each takes half of it.
        send_s = [0.0] * len(stages)
        for s, (place, following) in enumerate(pairwise(places)):
            if place != following:
                send_s[s] = stages[s + 1].comm_s / 2
        updates_s = list[float]()
        room_bytes = list[float]()
        for d in range(problem.devices):
            here = [x for x, place in zip(stages, places, strict=True) if place == d]
            updates_s.append(sum((x.update_s for x in here), 0.0))
            limit = problem.limit_of(d)
            room = float("inf")
            if limit is not None:
                # `beyond` is what a stage needs while it works. Stages of a device work one at a
                # time, so only the largest counts.
                beyond = max(x.held.beyond for x in here)
                room = float(limit - sum(x.held.static for x in here) - beyond)
            room_bytes.append(room)
        is_limited = problem.memory_limit_bytes is not None
        early = list(_early(problem, decision.bounds)) if is_limited else []
        seconds = {}
        more_bytes = {}
        for kind in ORDERED_KINDS:
            traits = KINDS[kind]
            seconds[kind] = [stage.task_s(kind) for stage in stages]
            # What a micro-batch in flight holds, and what it holds between I and W.
            more_bytes[kind] = [
                float(traits.in_flight * (x.kept + x.swapped) + traits.between * x.handed)
                for x in sizes
            ]
        return Loads(
            places=places,
            microbatches=problem.microbatches,
            seconds=seconds,
            send_s=send_s,
            more_bytes=more_bytes,
            room_bytes=room_bytes,
            splits=[x.halves_s[1] > 0 for x in stages],
            in_flight=problem.in_flight,
            early=early,
            early_s=[x.early_s for x in stages],
            updates_s=updates_s,
        )

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.room_bytes)

    def stages_on(self, d: int) -> list[int]:
        """Lists the stages of a device, in the order of the forward."""
        return [s for s, place in enumerate(self.places) if place == d]

    @property
    def unit_bytes(self) -> list[float]:
        """For each device, what one micro-batch holds if it is in flight on all of its stages."""
        return [sum(self.kept_bytes[s] for s in self.stages_on(d)) for d in range(self.devices)]

    def peak_bytes(self, tasks: Sequence[Task]) -> float:
        """Counts the most bytes that micro-batches hold at once on a device with these tasks."""
        added = (self.more_bytes[kind][s] for s, kind, _ in tasks)
        return max(accumulate(added, initial=0.0))

    @property
    def kept_bytes(self) -> list[float]:
        """What a micro-batch in flight holds on each stage."""
        return self.more_bytes[Kind.F]

    def fits(self, order: TaskLists) -> bool:
        """Tells whether each device has room for what an order has in flight."""
        rooms = zip(order, self.rooms_bytes(order), strict=True)
        return all(self.peak_bytes(tasks) <= room for tasks, room in rooms)

    def rooms_bytes(self, order: TaskLists) -> list[float]:
        """Counts the bytes that micro-batches in flight may hold on each device under an order."""
        rooms = list(self.room_bytes)
        k = self._most_in_flight(order) if self.early else []
        # `room_bytes` was counted for the problem's schedule. An order with fewer micro-batches
        # between a maker and its reader lets the reader hold fewer early values: it has more room.
        for s, maker, size in self.early:
            before = self.in_flight[maker] - self.in_flight[s]
            now = k[maker] - k[s]
            rooms[self.places[s]] += (before - now) * size
        return rooms

    def _most_in_flight(self, order: TaskLists) -> list[int]:
        """Counts the most micro-batches that each stage has in flight under an order."""
        peaks = [0] * len(self.places)
        now = [0] * len(self.places)
        for tasks in order:
            for s, kind, _ in tasks:
                now[s] += KINDS[kind].in_flight
                peaks[s] = max(peaks[s], now[s])
        return peaks

    def bound_s(self) -> float:
        """Bounds the seconds of any order from below.

        A device cannot begin before its first micro-batch has arrived. After that it has to do the
        work of all micro-batches and its updates, at best without a pause.
        """
        arrived_s = 0.0
        first_s = dict[int, float]()  # the earliest arrival of a micro-batch at each device
        works_s = [0.0] * self.devices  # the work of one micro-batch on each device
        for s, place in enumerate(self.places):
            forward_s = self.seconds[Kind.F][s]
            backward_s = self.seconds[Kind.B][s]
            if self.splits[s]:
                halves_s = self.seconds[Kind.I][s] + self.seconds[Kind.W][s]
                backward_s = min(backward_s, halves_s)
            first_s.setdefault(place, arrived_s)
            works_s[place] += forward_s + backward_s
            arrived_s += forward_s + self.send_s[s]
        M = self.microbatches
        return max(start_s + M * works_s[d] + self.updates_s[d] for d, start_s in first_s.items())


def _early(problem: Problem, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the early values that `stage_bytes.waiting_bytes` counts, each as in `Loads.early`."""
    for s, (i, j) in enumerate(pairwise(bounds)):
        for edge in problem.costs.edges_at(i, j):
            is_read = any(i <= reader < j for reader in edge.readers)
            if edge.producer < i and is_read:
                # `waiting_bytes` takes the making stage to be as early as possible: each
                # stage has at least one layer, so the maker is at most `away` stages before
                # the reader.
                away = i - edge.producer
                yield s, max(0, s - away), edge.bytes
