"""What an order of tasks is chosen for: seconds and bytes per stage.

Legend: a step is a tuple (kind, stage, micro-batch) as `Task` has them, but plain; an order has a list of steps per
device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, stage_cost

Step = tuple[Kind, int, int]
Order = list[list[Step]]
Known = dict[tuple[int, int, tuple[int, ...]], StageCost]
"""What stages take, by their number, first layer and choices."""


@dataclass(frozen=True)
class Loads:
    """A plan's stages for orders, in the order of the forward; B and I include what is computed again before them.

    With `early_s` of that they begin before their cotangents are there. Devices end with their updates.

    Sends take no time between stages on one device. `room_bytes` is what each device has for micro-batches in flight,
    infinite without a limit, if that many are `in_flight` on each stage: `early` are a stage, the one that makes a
    value for it, and its bytes, which lie there once for each micro-batch that is in flight on that one and not yet on
    this one. `splits` says whose backwards may run in two halves.
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
    def of(problem: Problem, decision: Decision, known: Known | None = None) -> "Loads":
        """Counts the loads of a plan.

        Args:
            problem: whose schedule says how many micro-batches are in flight.
            decision: the plan.
            known: what stages of the problem take; others are added.
        """
        known = {} if known is None else known
        stages = list[StageCost]()
        for s, (i, j) in enumerate(pairwise(decision.bounds)):
            key = s, i, decision.choices[i:j]
            if key not in known:
                known[key] = stage_cost(problem, s, i, j, decision.choices)
            stages.append(known[key])
        places, limits = problem.places, [problem.limit_of(d) for d in range(problem.devices)]
        held = [stage.held for stage in stages if stage.held is not None]
        mine = [
            [x for x, place in zip(held, places, strict=True) if place == d]
            for d in range(problem.devices)
        ]
        taken = [sum(x.static for x in some) + max(x.beyond for x in some) for some in mine]
        away = [a != b for a, b in zip(places, [*places[1:], places[-1]], strict=True)]
        after = [stage.comm_s / 2 for stage in stages[1:]]
        return Loads(
            places=places,
            microbatches=problem.microbatches,
            seconds={
                Kind.F: tuple(x.forward_s for x in stages),
                Kind.B: tuple(x.recompute_s + x.backward_s for x in stages),
                Kind.I: tuple(x.recompute_s + x.halves_s[0] for x in stages),
                Kind.W: tuple(x.halves_s[1] for x in stages),
            },
            send_s=(*(s if there else 0.0 for s, there in zip(after, away, strict=False)), 0.0),
            return_s=(0.0, *(s if there else 0.0 for s, there in zip(after, away, strict=False))),
            kept_bytes=tuple(float(x.kept + x.swapped) for x in held),
            handed_bytes=tuple(float(x.handed) for x in held),
            room_bytes=tuple(
                float("inf") if x is None else float(x - n)
                for x, n in zip(limits, taken, strict=True)
            ),
            splits=tuple(x.halves_s[1] > 0 for x in stages),
            in_flight=problem.in_flight,
            early=()
            if problem.memory_limit_bytes is None
            else tuple(_early(problem, decision.bounds)),
            early_s=tuple(x.early_s for x in stages),
            update_s=tuple(x.update_s for x in stages),
        )

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.room_bytes)

    def stages_on(self, d: int) -> list[int]:
        """The stages of a device, in the order of the forward."""
        return [s for s, place in enumerate(self.places) if place == d]

    def updates_s(self, d: int) -> float:
        """The seconds of a device's updates, behind all its steps."""
        return sum((self.update_s[s] for s in self.stages_on(d)), 0.0)

    def peak_bytes(self, steps: Sequence[Step]) -> float:
        """The most that micro-batches in flight hold on a device that takes these steps."""
        held = most = 0.0
        for kind, s, _ in steps:
            held += self._more_bytes[kind][s]
            most = max(most, held)
        return most

    @cached_property
    def _more_bytes(self) -> dict[Kind, list[float]]:
        """By how much more a device holds after a task of each kind; of a kind that is not here nobody has said it."""
        kept, handed = self.kept_bytes, self.handed_bytes
        return {
            Kind.F: list(kept),
            Kind.B: [-x for x in kept],
            Kind.I: [h - x for x, h in zip(kept, handed, strict=True)],
            Kind.W: [-x for x in handed],
        }

    def over_bytes(self, order: Order) -> list[float]:
        """By how much each device holds more than it has room for under an order; less than 0 if it fits."""
        rooms = zip(order, self.rooms_bytes(order), strict=True)
        return [self.peak_bytes(steps) - room for steps, room in rooms]

    def fits(self, order: Order) -> bool:
        """Whether each device has room for what is in flight."""
        return min(self.room_bytes) == float("inf") or max(self.over_bytes(order)) <= 0

    def rooms_bytes(self, order: Order) -> list[float]:
        """What each device has for micro-batches in flight under an order."""
        rooms, k = list(self.room_bytes), self._most_in_flight(order) if self.early else []
        for s, maker, size in self.early:
            before, now = self.in_flight[maker] - self.in_flight[s], k[maker] - k[s]
            rooms[self.places[s]] += (before - now) * size
        return rooms

    def _most_in_flight(self, order: Order) -> list[int]:
        most, now = [0] * len(self.places), [0] * len(self.places)
        for steps in order:
            for kind, s, _ in steps:
                now[s] += KINDS[kind].in_flight
                most[s] = max(most[s], now[s])
        return most

    def bound_s(self) -> float:
        """Seconds that no order is below: each device's work, from when its first micro-batch can be there."""
        arrived, arrivals_s = 0.0, dict[int, float]()
        least = [
            f + min(b, i + w) if split else f + b
            for f, b, i, w, split in zip(
                *(self.seconds[kind] for kind in self.seconds), self.splits, strict=True
            )
        ]
        for s, place in enumerate(self.places):
            arrivals_s.setdefault(place, arrived)
            arrived += self.seconds[Kind.F][s] + self.send_s[s]
        return max(
            arrivals_s[d]
            + self.microbatches * sum(least[s] for s in self.stages_on(d))
            + self.updates_s(d)
            for d in arrivals_s
        )


def _early(problem: Problem, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the values that `waiting_bytes` counts: the stage that reads one, that which makes it, and its bytes."""
    for s, (i, j) in enumerate(pairwise(bounds)):
        for edge in problem.costs.edges_at(i, j):
            if edge.producer < i and any(i <= reader < j for reader in edge.readers):
                yield s, max(0, s - (i - edge.producer)), edge.bytes


def order_of(lists: TaskLists) -> Order:
    """Task lists as an order."""
    return [[(task.kind, task.stage, task.microbatch) for task in tasks] for tasks in lists]


def lists_of(order: Order) -> TaskLists:
    """An order as task lists."""
    return tuple(tuple(Task(s, kind, m) for kind, s, m in steps) for steps in order)
