"""Whether any order of tasks keeps a limit, by looking at all that devices can do, for tiny chains
without swaps.

A state says of each stage how many micro-batches have been forward, how many have given their
cotangent back, and how many have added to the gradients: micro-batches are alike, so that nothing
else matters. A stage runs a forward (F), a backward (B), or the halves of one (I, W). The search
goes through all states in which no device holds too much.

What is counted is what `stage_bytes.py` and `stage_cost.py` tell in words; no code of theirs is
used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, pairwise, product

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.model.problem import Problem

KEEP, AGAIN, CHAIN = range(3)
"""A layer's residuals are kept; it runs again from its input; it does, and its input is made again
too.
"""
State = tuple[tuple[int, int, int], ...]
Reached = tuple[bool, ...]
"""Of which stages as many micro-batches have been in flight as are to be."""


@dataclass(frozen=True, order=True)
class Held:
    """What a stage holds: always, per micro-batch in flight, per one between the halves, and beyond
    these.

    What is beyond is more where backwards run in halves.
    """

    static: int
    kept: int
    handed: int
    beyond: int
    beyond_halves: int


def some_order_keeps(problem: Problem, limit: int) -> bool:
    """Whether there are cuts, fates and an order on some placement under which no device holds more
    than the limit.
    """
    return any(
        _some_order(problem.microbatches, places, plan, edges, limit, split)
        for places in placements(problem)
        for plan, edges in _plans(problem, len(places))
        for split in (False, True)
    )


def placements(problem: Problem) -> Iterator[list[int]]:
    """Yields the device of each stage: one stage per device, two or four in a loop, two there and
    back.
    """
    devices = list(range(problem.devices))
    yield devices
    if len(devices) > 1:
        yield from (
            x
            for x in (2 * devices, 4 * devices, devices + devices[::-1])
            if len(x) <= _layers(problem)
        )


def _layers(problem: Problem) -> int:
    return len(problem.costs.layers)


def _plans(problem: Problem, stages: int) -> Iterator[tuple[tuple[Held, ...], list[int]]]:
    """Yields what the stages hold under all cuts and fates, and the bytes of the value that each
    one receives.
    """
    for inner in combinations(range(1, _layers(problem)), stages - 1):
        bounds = (0, *inner, _layers(problem))
        edges = [0, *(problem.costs.edges[cut - 1].bytes for cut in inner)]
        ways = [_ways(problem, i, j) for i, j in pairwise(bounds)]
        yield from ((plan, edges) for plan in product(*ways))


def _ways(problem: Problem, i: int, j: int) -> list[Held]:
    """What a stage may hold under all fates, without what holds nowhere less than another."""
    fates = product((KEEP, AGAIN, CHAIN), repeat=j - i)
    every = {
        held_by(problem, i, j, x)
        for x in fates
        if x[0] != CHAIN and (KEEP, CHAIN) not in pairwise(x)
    }
    fields = [(x, (x.static, x.kept, x.handed, x.beyond, x.beyond_halves)) for x in sorted(every)]

    def useless(mine: tuple[int, ...]) -> bool:
        return any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for _, other in fields
        )

    return [x for x, mine in fields if not useless(mine)]


def held_by(problem: Problem, i: int, j: int, fates: tuple[int, ...]) -> Held:
    """What layers [i, j) hold under these fates."""
    costs, layers = problem.costs, problem.costs.layers[i:j]
    left = [_left(layer, fate) for layer, fate in zip(layers, fates, strict=True)]
    needs = [_needs(layers, fates, at) for at in range(j - i)]
    split = [layer.split.held_bytes if layer.split else 0 for layer in layers]
    made = [edge.bytes for edge in costs.edges]
    if (
        i == 0
    ):  # nobody waits for a cotangent of the first layer: it runs in the second half, and reads all it has
        split[0] = left[0] + sum(made[:1])
    behind = [sum(left[at + 1 :]) for at in range(j - i)]
    between = [sum(split[at + 1 :]) for at in range(j - i)]
    # In the midst of I the layers behind hold what W will read already. Before I all that is left
    # is there, after it all that is handed over: one of both is counted by the order.
    most = max(sum(left[: at + 1]) + needs[at] + between[at] for at in range(j - i))
    beyond = max(0, *(need - later for need, later in zip(needs, behind, strict=True)))
    ends = max(sum(left), sum(split))
    return Held(
        static=sum(x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes for x in layers)
        + sum(made[j - 1 : j]),
        kept=sum(left),
        handed=sum(split),
        beyond=beyond,
        beyond_halves=max(beyond, most - ends),
    )


def _left(layer: LayerCost, fate: int) -> int:
    """What a forward leaves: the residuals and the input, the input, or nothing."""
    return {
        KEEP: layer.input_bytes + layer.options[0].kept_bytes,
        AGAIN: layer.input_bytes,
        CHAIN: 0,
    }[fate]


def _needs(layers: tuple[LayerCost, ...], fates: tuple[int, ...], at: int) -> int:
    """What a layer runs with beside what is left: its own, and that of its run so far."""
    layer, fate = layers[at], fates[at]
    if fate == KEEP:
        return layer.temporary_bytes
    first = max(x for x in range(at + 1) if fates[x] == AGAIN)
    run = sum(x.options[0].kept_bytes for x in layers[first:at])
    run += sum(x.input_bytes for x in layers[first + 1 : at + 1])
    last = layer.options[-1]
    goes_on = at + 1 < len(fates) and fates[at + 1] == CHAIN
    own = layer.options[0].kept_bytes if goes_on else last.kept_bytes + last.extra_bytes
    return run + own + layer.temporary_bytes


def _some_order(
    microbatches: int,
    places: list[int],
    plan: tuple[Held, ...],
    edges: list[int],
    limit: int,
    split: bool,
) -> bool:
    """Whether an order of these stages keeps the limit, for some numbers of micro-batches in flight
    at most.
    """
    numbers = combinations_with_replacement(range(1, microbatches + 1), len(places))
    return any(
        _ordered(microbatches, places, plan, edges, limit, most[::-1], split) for most in numbers
    )


def _ordered(
    M: int,
    places: list[int],
    plan: tuple[Held, ...],
    edges: list[int],
    limit: int,
    most: tuple[int, ...],
    split: bool,
) -> bool:
    """Whether an order keeps the limit under which just so many micro-batches are in flight on each
    stage at most.

    Of what a stage receives, as many values may wait as are in flight on the stage before and not
    on this one.
    """
    stages = range(len(places))
    rooms = [limit] * (max(places) + 1)
    beyond = [0] * len(rooms)
    for s in stages:
        early = (most[s - 1] - most[s]) * edges[s] if s else 0
        rooms[places[s]] -= plan[s].static + early
        beyond[places[s]] = max(
            beyond[places[s]], plan[s].beyond_halves if split else plan[s].beyond
        )
    rooms = [room - more for room, more in zip(rooms, beyond, strict=True)]

    def fits(state: State, s: int) -> bool:
        mine = [t for t in stages if places[t] == places[s]]
        held = sum(
            (f - i) * plan[t].kept + (i - w) * plan[t].handed
            for t, (f, i, w) in ((t, state[t]) for t in mine)
        )
        return state[s][0] - state[s][1] <= most[s] and held <= rooms[places[s]]

    begin: State = ((0, 0, 0),) * len(places)
    reached: Reached = (False,) * len(places)
    todo: list[tuple[State, Reached]] = [(begin, reached)]
    seen = set(todo)
    while todo:
        state, reached = todo.pop()
        if all(w == M for _, _, w in state) and all(reached):
            return True
        for s, own in _next(state, M, split):
            then = (*state[:s], own, *state[s + 1 :])
            if not fits(then, s):
                continue
            full = reached[s] or own[0] - own[1] == most[s]
            after = then, (*reached[:s], full, *reached[s + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return False


def _next(state: State, M: int, split: bool) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yields the stages that may run something, and what they have done then."""
    last = len(state) - 1
    for s, (f, i, w) in enumerate(state):
        if f < M and (s == 0 or f < state[s - 1][0]):
            yield s, (f + 1, i, w)
        if i < f and (s == last or i < state[s + 1][1]):
            if (
                w == i
            ):  # a whole one adds to the gradients, which the halves before it must have done
                yield s, (f, i + 1, w + 1)
            if split:
                yield s, (f, i + 1, w)
        if split and w < i:
            yield s, (f, i, w + 1)
