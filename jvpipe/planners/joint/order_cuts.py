"""Cuts and fates for orders, quickly: devices that work as long as each other, and one price per byte on each device.

Fates that swap are not looked at here: an order with what it leaves to I and W rarely waits long enough.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.segments import Cuts
from jvpipe.planners.model.stage_bytes import LayerBytes, option_bytes, recomputed_bytes, stage_bytes
from jvpipe.planners.model.stage_cost import joint_bytes
from jvpipe.schedules.schedule import Holding

PRICES = 14
"""How often the price of a byte is halved or doubled."""


def balanced(problem: Problem, cuts: Cuts, layer_s: Float[np.ndarray, " layers"]) -> tuple[int, ...]:
    """Bounds of stages that take as long as each other, moved until no device's work falls any more.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end; at least one more than there are stages.
        layer_s: seconds of each layer's forward and backward, on a device as the costs say.
    """
    times = [np.array(problem.slowness(s) or 1.0) for s in range(problem.devices)]
    totals = np.array([np.concatenate([[0.0], np.cumsum(layer_s * each)])[cuts] for each in times])
    grids = [np.where(np.tri(len(cuts), dtype=bool), np.inf, total[None] - total[:, None]) for total in totals]
    _, found = least_path([grids[place] for place in problem.places], np.maximum)
    assert found is not None, "there are enough cuts"
    best, places = list(found), np.array(problem.places)

    def rank(bounds: Sequence[int]) -> tuple[float, float]:
        stages_s = totals[places, bounds[1:]] - totals[places, bounds[:-1]]
        devices_s = np.bincount(places, stages_s, problem.devices)
        return float(devices_s.max().round(12)), float((devices_s**2).sum() + (stages_s**2).sum())

    better = True
    while better:
        better = False
        for s in range(1, problem.stages):
            for by in (-1, 1):
                moved = [*best[:s], best[s] + by, *best[s + 1 :]]
                if moved[s - 1] < moved[s] < moved[s + 1] and rank(moved) < rank(best):
                    best, better = moved, True
    return tuple(int(cuts[place]) for place in best)


def with_fates(
    problem: Problem, bounds: tuple[int, ...], share: float = 1.0, begin: Decision | None = None
) -> Decision | None:
    """These cuts with fates that keep the limit, of few seconds; None if there are none.

    Args:
        problem: whose schedule and limit count.
        bounds: of the stages.
        share: of what the schedule has in flight that has to fit.
        begin: whose fates are kept on devices whose layers are the same.
    """
    choices = [0] * bounds[-1] if begin is None else list(begin.choices)
    before = None if begin is None else list(pairwise(begin.bounds))
    vectors = problem.schedule.held(problem.devices, problem.microbatches)
    for d, mine in enumerate(vectors):
        stages = [s for s, place in enumerate(problem.places) if place == d]
        if before is not None and all(before[s] == bounds[s : s + 2] for s in stages):
            continue

        def fits(
            price: float,
            stages: Sequence[int] = stages,
            mine: tuple = mine,
            limit: int | None = problem.limit_of(d),
        ) -> bool:
            for s in stages:
                _choose(problem, s, bounds, price, choices)
            held = [stage_bytes(problem, s, bounds[s], bounds[s + 1], choices) for s in stages]
            return limit is None or joint_bytes(held, mine, share) <= limit

        if fits(0.0):
            continue
        if not fits(float("inf")):
            return None
        layers = [layer for s in stages for layer in problem.costs.layers[bounds[s] : bounds[s + 1]]]
        low, high = 1e-6, 1e6  # around seconds of forwards per byte that they leave
        per_byte = sum(x.forward_s for x in layers) / max(1, sum(x.options[0].kept_bytes for x in layers))
        for _ in range(PRICES):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if fits(middle * per_byte) else (middle, high)
        fits(low * per_byte)
        wanted = list(choices)
        if not fits(high * per_byte):
            fits(float("inf"))
        _relax(problem, stages, bounds, mine, share, wanted, choices)
    return Decision(bounds, tuple(choices))


def _relax(
    problem: Problem,
    stages: Sequence[int],
    bounds: Sequence[int],
    vectors: Sequence[Holding],
    share: float,
    wanted: Sequence[int],
    choices: list[int],
) -> None:
    """Makes the choices of a device's layers those that are wanted, one by one, where there is room."""
    limit = problem.limit_of(problem.places[stages[0]])
    assert limit is not None
    held = [stage_bytes(problem, s, bounds[s], bounds[s + 1], choices) for s in stages]
    for k, s in enumerate(stages):
        for at in range(bounds[s], bounds[s + 1]):
            before, choices[at] = choices[at], wanted[at]
            if before == wanted[at]:
                continue
            was, held[k] = held[k], stage_bytes(problem, s, bounds[s], bounds[s + 1], choices)
            if joint_bytes(held, vectors, share) > limit:
                choices[at], held[k] = before, was


def _choose(problem: Problem, s: int, bounds: Sequence[int], price: float, choices: list[int]) -> None:
    """Writes the choices of a stage's layers that take the least, seconds and bytes at a price."""
    in_flight = problem.in_flight[s]
    for at in range(bounds[s], bounds[s + 1]):
        every = _ways(problem, at)
        if price == float("inf"):
            choices[at] = min(every, key=lambda one: (in_flight * one[1].left + one[1].working, one[1].extra_s))[0]
        else:
            choices[at] = min(every, key=lambda one: (one[1].extra_s + price * in_flight * one[1].left, one[0] < 0))[0]


def _ways(problem: Problem, at: int) -> list[tuple[int, LayerBytes]]:
    """The choices of a layer that do not swap, with their bytes."""
    layer = problem.costs.layers[at]
    options = [(c, option_bytes(layer, option)) for c, option in enumerate(layer.options)]
    return [*((c, way) for c, way in options if not way.swapped), (RECOMPUTE, recomputed_bytes(layer))]


def moved_bounds(bounds: Sequence[int], cuts: Cuts) -> list[tuple[int, ...]]:
    """All bounds with one of them a place further or nearer."""
    places = {int(cut): place for place, cut in enumerate(cuts)}
    found = []
    for s in range(1, len(bounds) - 1):
        for by in (-1, 1):
            place = places[bounds[s]] + by
            moved = (*bounds[:s], int(cuts[place]), *bounds[s + 1 :])
            if all(a < b for a, b in pairwise(moved)):
                found.append(moved)
    return found
