"""What an order of tasks is chosen for: seconds and bytes per stage, and a clock that is quick enough to ask often.

Legend: a step is a tuple (kind, stage, micro-batch) as `Task` has them, but plain; an order has a list of steps per
device. The clock is the simulator's without swaps, where no two transfers share a link; what counts in the end is
simulated (`simulated_step_s`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import StageCost

Step = tuple[Kind, int, int]
Order = list[list[Step]]


@dataclass(frozen=True)
class Loads:
    """A plan's stages for orders, in the order of the forward; B and I include what is computed again before them.

    Sends take no time between stages on one device. `room_bytes` is what each device has for micro-batches in flight,
    infinite without a limit; `splits` says whose backwards may run in two halves.
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

    @staticmethod
    def of(problem: Problem, stages: Sequence[StageCost]) -> "Loads":
        """The loads of evaluated stages."""
        places, limit = problem.places, problem.memory_limit_bytes
        held = [stage.held for stage in stages if stage.held is not None]
        mine = [[x for x, place in zip(held, places, strict=True) if place == d] for d in range(problem.devices)]
        taken = [sum(x.static for x in some) + max(x.beyond for x in some) for some in mine]
        away = [a != b for a, b in zip(places, [*places[1:], places[-1]], strict=True)]
        after = [stage.comm_s / 2 for stage in stages[1:]]
        return Loads(
            places=places,
            microbatches=problem.microbatches,
            seconds={
                Kind.F: tuple(x.forward_s for x in stages),
                Kind.B: tuple(x.recompute_s + x.backward_s for x in stages),
                Kind.I: tuple(x.recompute_s + x.input_s for x in stages),
                Kind.W: tuple(x.weight_s for x in stages),
            },
            send_s=(*(s if there else 0.0 for s, there in zip(after, away, strict=False)), 0.0),
            return_s=(0.0, *(s if there else 0.0 for s, there in zip(after, away, strict=False))),
            kept_bytes=tuple(float(x.kept + x.swapped) for x in held),
            handed_bytes=tuple(float(x.handed) for x in held),
            room_bytes=tuple(float("inf") if limit is None else float(limit - n) for n in taken),
            splits=tuple(x.weight_s > 0 for x in stages),
        )

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.room_bytes)

    def stages_on(self, d: int) -> list[int]:
        """The stages of a device, in the order of the forward."""
        return [s for s, place in enumerate(self.places) if place == d]

    def peak_bytes(self, steps: Sequence[Step]) -> float:
        """The most that micro-batches in flight hold on a device that takes these steps."""
        held = most = 0.0
        for kind, s, _ in steps:
            info = KINDS[kind]
            held += info.in_flight * self.kept_bytes[s] + info.between * self.handed_bytes[s]
            most = max(most, held)
        return most

    def fits(self, order: Order) -> bool:
        """Whether each device has room for what is in flight."""
        return all(self.peak_bytes(steps) <= room for steps, room in zip(order, self.room_bytes, strict=True))

    def bound_s(self) -> float:
        """Seconds that no order is below: each device's work, from when its first micro-batch can be there."""
        arrived, found = 0.0, dict[int, float]()
        least = [
            f + min(b, i + w) if split else f + b
            for f, b, i, w, split in zip(*(self.seconds[kind] for kind in self.seconds), self.splits, strict=True)
        ]
        for s, place in enumerate(self.places):
            found.setdefault(place, arrived)
            arrived += self.seconds[Kind.F][s] + self.send_s[s]
        return max(found[d] + self.microbatches * sum(least[s] for s in self.stages_on(d)) for d in found)


@dataclass
class Clock:
    """When the steps of an order start and end; `stuck` if they wait for each other."""

    starts_s: list[list[float]]
    ends_s: list[list[float]]
    stuck: bool = False

    @property
    def step_s(self) -> float:
        """When the last one ends; infinite if they are stuck."""
        return float("inf") if self.stuck else max(ends[-1] for ends in self.ends_s)


def clocked(loads: Loads, order: Order) -> Clock:
    """Runs an order."""
    last, places, M = len(loads.places) - 1, loads.places, loads.microbatches
    seconds, send_s, return_s = loads.seconds, loads.send_s, loads.return_s
    there: dict[tuple[int, int, bool], float] = {(0, m, True): 0.0 for m in range(M)}  # True: for F
    done: dict[tuple[int, int, bool], float] = {}
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    links: dict[tuple[int, int], float] = {}
    free = [0.0] * len(order)
    blocked: dict[tuple[int, int, bool], int] = {}
    ready = list(range(len(order)))
    while ready:
        d = ready.pop()
        steps, now = order[d], free[d]
        mine, over = starts[d], ends[d]
        for kind, s, m in steps[len(mine) :]:
            key = (s, m, kind is Kind.F)
            if kind is Kind.W:
                begin = now
                if (s, m, False) not in done:
                    return Clock(starts, ends, stuck=True)
            else:
                if key not in there:
                    blocked[key] = d
                    break
                begin = max(now, there[key])
                if kind is not Kind.F and (s, m, True) not in done:
                    return Clock(starts, ends, stuck=True)
            now = begin + seconds[kind][s]
            mine.append(begin)
            over.append(now)
            if kind is Kind.W:
                continue
            done[key] = now
            forward = kind is Kind.F
            to = s if forward and s == last else s + 1 if forward else s - 1
            if to < 0:
                continue
            target = (to, m, forward and s != last)
            takes, e = (send_s if forward else return_s)[s], places[to]
            arrives = now
            if e != d and takes:
                arrives = max(now, links.get((d, e), 0.0)) + takes
                links[d, e] = arrives
            there[target] = arrives
            if target in blocked:
                ready.append(blocked.pop(target))
        free[d] = now
    return Clock(starts, ends, stuck=any(len(a) < len(b) for a, b in zip(starts, order, strict=True)))


def order_of(lists: TaskLists) -> Order:
    """Task lists as an order."""
    return [[(task.kind, task.stage, task.microbatch) for task in tasks] for tasks in lists]


def lists_of(order: Order) -> TaskLists:
    """An order as task lists."""
    return tuple(tuple(Task(s, kind, m) for kind, s, m in steps) for steps in order)
