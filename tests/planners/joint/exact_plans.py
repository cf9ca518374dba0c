"""The fastest plan there is for tiny chains without swaps and links: cuts, fates and order of
tasks, all at once.

A schedule is built task by task, in the order in which tasks start. A state says of each stage how
many micro-batches have been forward, how many have given their cotangent back, and how many have
added to the gradients, when each device is free, and when what is on its way arrives. Of two states
with equal counts, one that is nowhere later is enough: what devices hold follows from the counts. A
state is given up where what a device still has to do, or the way of the last micro-batch, does not
end before the best plan that is known.

What is counted is what `stage_bytes.py` and `stage_cost.py` tell in words; no code of theirs is
used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from operator import itemgetter, le

from jvpipe.planners.model.problem import Problem
from tests.planners.joint.exact_orders import AGAIN, CHAIN, KEEP, Held, held_by, placements

Counts = tuple[int, ...]
STATES = 400_000
"""States of one plan's schedules after which nothing is said about it."""


@dataclass(frozen=True)
class Plan:
    """The fastest plan: seconds, the device of each stage, the fates of its layers, a line of tasks
    per device.
    """

    step_s: float
    places: list[int]
    fates: tuple[tuple[int, ...], ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """What a stage takes and holds under its fates: seconds of F, B, I and W."""

    f: float
    b: float
    i: float
    w: float
    held: Held
    fates: tuple[int, ...]

    def least_s(self, split: bool) -> float:
        """What a backward takes at least."""
        return min(self.b, self.i + self.w) if split else self.b


Times = list[float]


class TooLargeError(Exception):
    """There are more states than are looked at."""


def fastest(problem: Problem, limit: int | None, below_s: float) -> Plan | None:
    """The fastest plan, if its step is below a number of seconds.

    Args:
        problem: a chain.
        limit: bytes per device.
        below_s: seconds of a plan that is known.
    """
    every = list[tuple[float, bool, int, list[int], tuple[Stage, ...]]]()
    for at, places in enumerate(placements(problem)):
        for split in (False, True):
            for plan in _plans(problem, len(places), limit is not None):
                bound_s = _bound_s(problem.microbatches, places, plan, split)
                if bound_s < below_s - 1e-9:
                    every.append((bound_s, split, at, places, plan))
    best: Plan | None = None
    for bound_s, split, _, places, plan in sorted(every, key=itemgetter(0)):
        if bound_s >= (best.step_s if best else below_s) - 1e-9:
            break
        schedules = _Schedules(problem.microbatches, places, plan, limit, split)
        if lines := schedules.fastest(best.step_s if best else below_s):
            best = Plan(schedules.best_s, places, tuple(x.fates for x in plan), lines)
    return best


def _plans(problem: Problem, stages: int, limited: bool) -> Iterator[tuple[Stage, ...]]:
    """Yields all cuts and fates, but for those that take no less than others and hold no less."""
    n = len(problem.costs.layers)
    ways = cache(lambda i, j: _ways(problem, i, j, limited))
    for inner in combinations(range(1, n), stages - 1):
        yield from product(*(ways(i, j) for i, j in pairwise((0, *inner, n))))


def _ways(problem: Problem, i: int, j: int, limited: bool) -> list[Stage]:
    """Lists what layers [i, j) may take, without what is nowhere better than another; all are kept
    without a limit.
    """
    layers, ways = problem.costs.layers[i:j], dict[tuple[float, ...], Stage]()
    halves = [
        (x.split.input_s, x.split.weight_s) if x.split else (x.backward_s, 0.0) for x in layers
    ]
    if i == 0:  # nobody waits for a cotangent of the first layer
        halves[0] = (0.0, layers[0].backward_s)
    f, b = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
    input_s, weight_s = (sum(each) for each in zip(*halves, strict=True))
    for fates in product((KEEP, AGAIN, CHAIN) if limited else (KEEP,), repeat=j - i):
        if fates[0] == CHAIN or (KEEP, CHAIN) in pairwise(fates):
            continue
        held = held_by(problem, i, j, fates)
        extra_s = sum(
            x.options[-1].extra_s for x, fate in zip(layers, fates, strict=True) if fate != KEEP
        )
        key = extra_s, held.static, held.kept, held.handed, held.beyond, held.beyond_halves
        ways[key] = Stage(f, b + extra_s, input_s + extra_s, weight_s, held, fates)
    return [ways[x] for x in ways if not any(y != x and all(map(le, y, x)) for y in ways)]


def _bound_s(microbatches: int, places: Sequence[int], plan: Sequence[Stage], split: bool) -> float:
    """Bounds a step: what a device works, after its first micro-batch came and before its last one
    is back.
    """
    every = []
    for d in set(places):
        mine = [s for s, place in enumerate(places) if place == d]
        first, work_s = plan[: mine[0]], sum(plan[s].f + plan[s].least_s(split) for s in mine)
        way_s = sum(x.f for x in first)
        back_s = 0.0 if split else sum(x.b for x in first)
        every.append(way_s + microbatches * work_s + back_s)
    return max(*every, sum(x.f + min(x.b, x.i if split else x.b) for x in plan))


class _Schedules:
    """All schedules of a plan."""

    def __init__(
        self, M: int, places: Sequence[int], plan: Sequence[Stage], limit: int | None, split: bool
    ) -> None:
        self.M, self.places, self.plan, self.split = M, places, plan, split
        self.stages, self.devices = range(len(plan)), range(max(places) + 1)
        self.rooms = [float("inf") if limit is None else float(limit)] * len(self.devices)
        for d in self.devices:
            mine = [x.held for x, place in zip(plan, places, strict=True) if place == d]
            beyond = max(x.beyond_halves if split else x.beyond for x in mine)
            self.rooms[d] -= sum(x.static for x in mine) + beyond
        self.first_s = [min(x.b, x.i) if split else x.b for x in plan]
        self.back_s = list(accumulate(self.first_s, initial=0.0))
        self.on_s = [sum(x.f for x in plan[s + 1 :]) + self.back_s[-1] for s in self.stages]

    def fastest(self, below_s: float) -> tuple[str, ...]:
        """The lines of the fastest one, if it takes less than a number of seconds; then `best_s`
        are its own.
        """
        self.lines: tuple[str, ...] = ()
        if any(x.held.kept > self.rooms[d] for x, d in zip(self.plan, self.places, strict=True)):
            return self.lines
        self.ran: list[tuple[int, str]] = []
        self.best_s, self.seen, self.left = below_s, dict[Counts, list[Times]](), STATES
        n, D = len(self.plan), len(self.devices)
        work_s = [0.0] * D
        for x, d in zip(self.plan, self.places, strict=True):
            work_s[d] += self.M * (x.f + x.least_s(self.split))
        self._go_on([0] * (3 * n), [0.0] * D, [0.0] * D, work_s, [[] for _ in range(2 * n)], 0.0)
        return self.lines

    def _go_on(
        self,
        done: list[int],
        free: list[float],
        held: list[float],
        work_s: list[float],
        ends: list[list[float]],
        now: float,
    ) -> None:
        """Goes on from a state; `ends` are those of forwards and first halves of each stage, `now`
        the last start.
        """
        n, M = len(self.plan), self.M
        if min(done[2 * n :]) == M:
            if max(free) < self.best_s:
                self.best_s = max(free)
                self.lines = tuple(
                    " ".join(text for at, text in self.ran if at == d) for d in self.devices
                )
            return
        if self._is_late(done, free, work_s, now) or self._is_seen(done, free, ends, now):
            return
        self.left -= 1
        if self.left < 0:
            raise TooLargeError
        for start, _, s, kind in sorted(self._next(done, free, held, ends, now)):
            x, d = self.plan[s], self.places[s]
            seconds = (x.f, x.i, x.w, x.b)[kind]
            own, rest = list(done), list(work_s)
            for part in ((0,), (1,), (2,), (1, 2))[kind]:
                own[part * n + s] += 1
            rest[d] -= self._least_s(done, s) - self._least_s(own, s)
            more = (x.held.kept, x.held.handed - x.held.kept, -x.held.handed, -x.held.kept)[kind]
            then, room = list(free), list(held)
            then[d], room[d] = start + seconds, held[d] + more
            line = None if kind == 2 else ends[(kind > 0) * n + s]
            if line is not None:
                line.append(start + seconds)
            self.ran.append((d, f"{s}{'FIWB'[kind]}{done[(0, n, 2 * n, n)[kind] + s]}"))
            self._go_on(own, then, room, rest, ends, start)
            self.ran.pop()
            if line is not None:
                line.pop()

    def _least_s(self, done: Sequence[int], s: int) -> float:
        """What a stage has still to do at least."""
        x, n, M = self.plan[s], len(self.plan), self.M
        f, i, w = done[s], done[n + s], done[2 * n + s]
        return (M - f) * x.f + (M - i) * x.least_s(self.split) + (i - w) * x.w

    def _is_late(
        self, done: Sequence[int], free: Sequence[float], work_s: Sequence[float], now: float
    ) -> bool:
        """Whether a state does not end before the best schedule that is known."""
        n, M, enough_s = len(self.plan), self.M, self.best_s - 1e-9
        begin = [max(now, x) for x in free]
        if any(a + b >= enough_s for a, b in zip(begin, work_s, strict=True)):
            return True
        for s in self.stages:
            there_s, x = begin[self.places[s]], self.plan[s]
            if done[s] < M and there_s + (M - done[s]) * x.f + self.on_s[s] >= enough_s:
                return True
            left = M - done[n + s]
            if left and there_s + left * self.first_s[s] + self.back_s[s] >= enough_s:
                return True
        return False

    def _is_seen(
        self,
        done: Sequence[int],
        free: Sequence[float],
        ends: Sequence[Sequence[float]],
        now: float,
    ) -> bool:
        """Whether a state with equal counts was nowhere later."""
        n = len(self.plan)
        times = [max(now, x) for x in free]
        for s in self.stages:
            if s:
                times += [max(now, x) for x in ends[s - 1][done[s] :]]
            if s + 1 < n:
                times += [max(now, x) for x in ends[n + s + 1][done[n + s] :]]
        others = self.seen.setdefault(tuple(done), [])
        if any(all(map(le, other, times)) for other in others):
            return True
        others[:] = [other for other in others if not all(map(le, times, other))]
        others.append(times)
        return False

    def _next(
        self,
        done: Sequence[int],
        free: Sequence[float],
        held: Sequence[float],
        ends: Sequence[Sequence[float]],
        now: float,
    ) -> Iterator[tuple[float, int, int, int]]:
        """Yields what may run next: when it starts, how late it is liked, its stage and kind (F, I,
        W, B).
        """
        n, M = len(self.plan), self.M
        for s in self.stages:
            x, d = self.plan[s], self.places[s]
            f, i, w = done[s], done[n + s], done[2 * n + s]
            begin, room = max(now, free[d]), self.rooms[d] - held[d]
            if f < M and (s == 0 or f < done[s - 1]) and x.held.kept <= room:
                yield max(begin, ends[s - 1][f] if s else 0.0), 1, s, 0
            if i < f and (s + 1 == n or i < done[n + s + 1]):
                start = max(begin, ends[s][i] if s + 1 == n else ends[n + s + 1][i])
                if w == i:
                    yield start, 0, s, 3
                if self.split and x.w and x.held.handed - x.held.kept <= room:
                    yield start, 0, s, 1
            if w < i:
                yield begin, 2, s, 2
