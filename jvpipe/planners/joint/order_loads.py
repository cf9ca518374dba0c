"""What an order of tasks is chosen for: seconds and bytes per stage, and a clock that is quick enough to ask often.

Legend: a step is a tuple (kind, stage, micro-batch) as `Task` has them, but plain; an order has a list of steps per
device. The clock is the simulator's without swaps, where no two transfers share a link; what counts in the end is
simulated (`simulated_step_s`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jvpipe.ir.kinds import Kind
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
        places, limits = problem.places, [problem.limit_of(d) for d in range(problem.devices)]
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
            room_bytes=tuple(float("inf") if x is None else float(x - n) for x, n in zip(limits, taken, strict=True)),
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
        F, B, W = Kind.F, Kind.B, Kind.W
        for kind, s, _ in steps:
            if kind is F:
                held += self.kept_bytes[s]
            elif kind is W:
                held -= self.handed_bytes[s]
            else:
                held += (0.0 if kind is B else self.handed_bytes[s]) - self.kept_bytes[s]
            most = max(most, held)
        return most

    def fits(self, order: Order) -> bool:
        """Whether each device has room for what is in flight."""
        return all(self.peak_bytes(steps) <= room for steps, room in zip(order, self.room_bytes, strict=True))

    def bound_s(self) -> float:
        """Seconds that no order is below: each device's work, from when its first micro-batch can be there."""
        arrived, arrivals_s = 0.0, dict[int, float]()
        least = [
            f + min(b, i + w) if split else f + b
            for f, b, i, w, split in zip(*(self.seconds[kind] for kind in self.seconds), self.splits, strict=True)
        ]
        for s, place in enumerate(self.places):
            arrivals_s.setdefault(place, arrived)
            arrived += self.seconds[Kind.F][s] + self.send_s[s]
        return max(arrivals_s[d] + self.microbatches * sum(least[s] for s in self.stages_on(d)) for d in arrivals_s)


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
    M, last = loads.microbatches, len(loads.places) - 1
    F, B, W = Kind.F, Kind.B, Kind.W  # looked up by identity: hashing kinds would take half of the time
    forward_s, backward_s, input_s, weight_s = loads.seconds.values()
    cells = M * len(loads.places)  # one per stage and micro-batch: when it may go forward, and backward
    ahead, back, passed = [-1.0] * cells, [-1.0] * cells, [False] * cells
    ahead[:M] = [0.0] * M
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    links: dict[tuple[int, int], float] = {}
    free, waits = [0.0] * len(order), dict[tuple[bool, int], int]()  # who waits for a cell
    ready = list(range(len(order)))
    while ready:
        d = ready.pop()
        now, steps, mine, over = free[d], order[d], starts[d], ends[d]
        for at in range(len(mine), len(steps)):
            kind, s, m = steps[at]
            cell, forward = s * M + m, kind is F
            begin = now
            if kind is W:
                if not passed[cell]:
                    return Clock(starts, ends, stuck=True)
            else:
                there = ahead[cell] if forward else back[cell]
                if there < 0:
                    waits[forward, cell] = d
                    break
                begin = max(now, there)
            now = begin + (forward_s if forward else weight_s if kind is W else backward_s if kind is B else input_s)[s]
            mine.append(begin)
            over.append(now)
            if kind is W:
                continue
            passed[cell] = not forward
            if not forward and not s:
                continue
            onward = forward and s < last
            target = cell + M if onward else cell if forward else cell - M
            stays = forward and not onward
            (ahead if onward else back)[target] = now if stays else _arrival_s(loads, links, d, s, now, forward=forward)
            if (onward, target) in waits:
                ready.append(waits.pop((onward, target)))
        free[d] = now
    return Clock(starts, ends, stuck=any(len(a) < len(b) for a, b in zip(starts, order, strict=True)))


def _arrival_s(
    loads: Loads, links: dict[tuple[int, int], float], d: int, s: int, now: float, *, forward: bool
) -> float:
    """When what a stage makes is with the next one; the link is taken till then."""
    takes_s = (loads.send_s if forward else loads.return_s)[s]
    if not takes_s:
        return now
    link = d, loads.places[s + 1 if forward else s - 1]
    links[link] = max(now, links.get(link, 0.0)) + takes_s
    return links[link]


def order_of(lists: TaskLists) -> Order:
    """Task lists as an order."""
    return [[(task.kind, task.stage, task.microbatch) for task in tasks] for tasks in lists]


def lists_of(order: Order) -> TaskLists:
    """An order as task lists."""
    return tuple(tuple(Task(s, kind, m) for kind, s, m in steps) for steps in order)
