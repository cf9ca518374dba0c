"""Fates of all layers of a device, against all of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.model.problem import RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import Evaluation, evaluate_decision
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import OneFOneB
from tests.grid import grid
from tests.planners.joint.orders import placed, problem_of

RULES = ("zb-h1", "interleaved", "zb-v", "v-half")


def drawn(seed: int, rule: str) -> tuple[Problem, tuple[int, ...]]:
    """Draws five layers that may swap on one or two devices, a value that two of them read, cuts
    and a limit.
    """
    draw = Random(seed)
    base = problem_of(5, 1 + seed % 2, 3, seed, link=Link(8.0, 0.1))
    layers = tuple(_swapping(layer, draw) for layer in base.costs.layers)
    shared = (Shared((1, 3), draw.randint(0, 4)),)
    problem = replace(base, costs=replace(base.costs, layers=layers, shared=shared), host=Link(9.0))
    schedule = find_schedule(rule)
    problem = replace(problem, schedule=schedule, stages=schedule.stages_on(problem.devices))
    inner = sorted(draw.sample(range(1, 5), problem.stages - 1))
    return problem, (0, *inner, 5)


def _swapping(layer: LayerCost, draw: Random) -> LayerCost:
    kept = layer.options[0].kept_bytes
    some = Option(0, kept), Option(kept // 2, 0, layer.forward_s / 3, draw.randint(0, 3))
    return replace(layer, options=(*layer.options, *some))


def every(problem: Problem, bounds: tuple[int, ...]) -> Iterator[tuple[Decision, Evaluation]]:
    """Yields all fates under these cuts, runs of several layers included."""
    columns = [range(RECOMPUTE_CHAIN, len(layer.options)) for layer in problem.costs.layers]
    for some in product(*columns):
        chained = [at for at, choice in enumerate(some) if choice == RECOMPUTE_CHAIN]
        if all(at not in bounds and some[at - 1] < 0 for at in chained):
            decision = Decision(bounds, some)
            yield decision, evaluate_decision(problem, decision)


def seconds(problem: Problem, found: Evaluation, d: int) -> float:
    """Counts what a device takes: its work, or if that is longer its link."""
    mine = [x for x, place in zip(found.stages, problem.places, strict=True) if place == d]
    return max(sum(x.compute_s for x in mine), sum(x.link_s for x in mine))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", grid(range(2), 1))
def test_no_fates_that_fit_take_fewer_seconds_and_none_fewer_bytes(rule: str, seed: int) -> None:
    problem, bounds = drawn(seed, rule)
    evaluated = list(every(problem, bounds))
    devices = range(problem.devices)
    held = np.array([found.device_bytes for _, found in evaluated])
    taken_s = np.array([[seconds(problem, found, d) for d in devices] for _, found in evaluated])
    emptiest = evaluate_decision(
        problem, DeviceFates.of(problem, swaps=True).emptiest(problem, bounds)
    )
    assert emptiest.device_bytes == tuple(held.min(0))
    for share in (0.0, 0.2, 0.5, 0.8):
        limit = int(held.min(0).max() + share * (held.max() - held.min(0).max()))
        tight = replace(problem, memory_limit_bytes=limit)
        one = DeviceFates.of(tight, swaps=True).fastest(tight, bounds)
        assert one is not None
        found = evaluate_decision(tight, one)
        assert found.limit_bytes <= limit
        for d in devices:
            least_s = taken_s[held[:, d] <= limit, d].min()
            assert seconds(tight, found, d) <= least_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half"])
def test_fates_keep_the_limit_or_there_are_none(name: str) -> None:
    problem, decision = placed(problem_of(12, 3, 8), find_schedule(name))
    most = evaluate_decision(problem, decision).peak_bytes
    for part in (1.0, 0.9, 0.6):
        tight = replace(problem, memory_limit_bytes=int(part * most))
        found = DeviceFates.of(tight).fastest(tight, decision.bounds)
        assert part < 0.8 or found is not None
        if found is not None:
            assert evaluate_decision(tight, found).peak_bytes <= part * most
            assert (found == decision) == (part == 1.0)
    tight = replace(problem, memory_limit_bytes=1)
    assert DeviceFates.of(tight).fastest(tight, decision.bounds) is None


def test_an_order_with_more_in_flight_does_not_get_the_swaps_of_one_with_fewer() -> None:
    # The host has room for 64 bytes: 8 for each of the 4 + 4 micro-batches in flight, which is a
    # swapped value each. With 8 + 4 in flight that is 5 bytes each, too few for a value.
    swapping = LayerCost("block", 1.0, 2.0, (Option(8), Option(0, 8)))
    costs = Costs((swapping,) * 4, tuple(Edge(i, (i + 1,), 0) for i in range(3)))
    few = Problem(
        costs,
        2,
        OneFOneB(most=[4, 4]),
        microbatches=8,
        memory_limit_bytes=48,
        host_limit_bytes=64,
        host=Link(100.0),
    )
    many = replace(few, schedule=OneFOneB(most=[8, 4]))
    bounds, moments = (0, 2, 4), [[((4, 0),)], [((4, 0),)]]
    chooser = DeviceFates.of(few, swaps=True)
    assert chooser.fastest(few, bounds, moments) == Decision(bounds, (0, 1, 0, 1))
    assert chooser.fastest(many, bounds, moments) == Decision(bounds, (-1, 0, -1, 0))
