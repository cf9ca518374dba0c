"""`auto` against the fastest plan there is: cuts, fates and order of tiny chains, all at once."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import given_lists, read_lines
from tests.grid import grid
from tests.planners.joint.exact_orders import AGAIN, CHAIN, KEEP
from tests.planners.joint.exact_plans import Plan, TooLargeError, fastest

CHOICES = {KEEP: 0, AGAIN: RECOMPUTE, CHAIN: RECOMPUTE_CHAIN}


def drawn(seed: int, most_layers: int, most_microbatches: int) -> Problem:
    """Draws a chain of unlike layers on two or three devices; what is sent takes neither time nor
    bytes.
    """
    draw = Random(seed)
    devices = draw.randint(2, 3)
    count = draw.randint(4, most_layers)
    microbatches, layers = draw.randint(2, most_microbatches), list[LayerCost]()
    for _ in range(count):
        f, i, w = draw.randint(2, 12), draw.randint(2, 14), draw.randint(2, 14)
        given_bytes, kept, between = draw.randint(1, 6), draw.randint(2, 10), draw.randint(1, 8)
        options = Option(kept), Option(0, extra_s=float(f), extra_bytes=kept)
        split = SplitCost(float(i), float(w), 0, between)
        one = LayerCost("layer", float(f), float(i + w), options, split=split)
        layers.append(replace(one, input_bytes=given_bytes))
    edges = tuple(Edge(at, (at + 1,), 0) for at in range(count - 1))
    return Problem(Costs(tuple(layers), edges), devices, find_schedule("1f1b"), microbatches)


def limited(problem: Problem, share: float | None) -> Problem:
    """Puts a limit on a problem: a share of what even cuts hold under 1F1B that keep everything."""
    if share is None:
        return problem
    n, stages = len(problem.costs.layers), problem.stages
    even = [round(s * n / stages) for s in range(stages + 1)]
    most = evaluate_decision(problem, Decision.keeping_all(even)).limit_bytes
    return replace(problem, memory_limit_bytes=int(share * most))


def simulated_s(problem: Problem, plan: Plan) -> float:
    """Simulates an exact plan, and asserts that it keeps the limit."""
    bounds = [0]
    for fates in plan.fates:
        bounds.append(bounds[-1] + len(fates))
    choices = tuple(CHOICES[fate] for fates in plan.fates for fate in fates)
    placed = replace(problem, stages=len(plan.places), schedule=given_lists(read_lines(plan.lines)))
    found = evaluate_decision(placed, Decision(tuple(bounds), choices))
    limit = problem.memory_limit_bytes
    assert limit is None or found.limit_bytes <= limit
    return simulated_step_s(placed, found.stages)


def ratio(problem: Problem) -> float | None:
    """How many times longer the plan of `auto` takes than the fastest; None if that is not known,
    or nothing fits.
    """
    try:
        ours_s = find_order(problem).step_s
        best = fastest(problem, problem.memory_limit_bytes, ours_s)
    except (Infeasible, TooLargeError):
        return None
    if best is None:
        return 1.0
    assert simulated_s(problem, best) == pytest.approx(best.step_s)
    return ours_s / best.step_s


@pytest.mark.parametrize("seed", range(3))
def test_an_exact_plan_takes_and_holds_what_it_says(seed: int) -> None:
    problem = limited(drawn(seed, 5, 3), 0.7)
    best = fastest(problem, problem.memory_limit_bytes, float("inf"))
    assert best is not None
    assert simulated_s(problem, best) == pytest.approx(best.step_s)


SMALL, LARGE = (range(1, 6), 5, 3), (range(16), 9, 5)


@pytest.mark.parametrize(
    ("seeds", "layers", "microbatches", "share", "worst"),
    grid(
        [
            (*SMALL, None, 1.001),
            (*SMALL, 0.6, 1.06),
            (*LARGE, None, 1.02),
            (*LARGE, 0.7, 1.06),
            (*LARGE, 0.5, 1.06),
        ],
        (*SMALL, None, 1.001),
        (*SMALL, 0.6, 1.06),
    ),
)
def test_auto_is_as_fast_as_any_plan_or_nearly(
    seeds: range, layers: int, microbatches: int, share: float | None, worst: float
) -> None:
    every = [ratio(limited(drawn(seed, layers, microbatches), share)) for seed in seeds]
    ratios = [one for one in every if one is not None]
    assert len(ratios) > len(seeds) / 2
    assert median(ratios) < 1.005
    assert max(ratios) < worst
