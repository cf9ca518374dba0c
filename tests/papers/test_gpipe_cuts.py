"""GPipe's planner: the least variance of the stages' forwards, everything computed again."""

from itertools import pairwise
from statistics import pvariance

import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.papers.gpipe_cuts import gpipe_cuts
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Problem
from jvpipe.planners.model.stage_cost import check, evaluate_decision
from jvpipe.schedules import find_schedule
from tests.planners.small import cuts, problems


def variance(problem: Problem, bounds: tuple[int, ...]) -> float:
    return pvariance(
        [sum(x.forward_s for x in problem.costs.layers[i:j]) for i, j in pairwise(bounds)]
    )


@settings(max_examples=25, deadline=None)
@given(problems(most_layers=8, tight=False))
def test_no_cuts_have_less_variance(problem: Problem) -> None:
    decision = gpipe_cuts(problem)
    check(problem, decision)
    least = min(variance(problem, bounds) for bounds in cuts(problem))
    assert variance(problem, decision.bounds) == pytest.approx(least)


def test_a_stage_keeps_its_input_alone() -> None:
    layers = tuple(LayerCost("layer", 1.0, 2.0, (Option(100),), input_bytes=10) for _ in range(6))
    edges = tuple(Edge(i, (i + 1,), 10) for i in range(5))
    problem = Problem(Costs(layers, edges), 2, find_schedule("gpipe"), 4)
    decision = gpipe_cuts(problem)
    assert decision.choices == (RECOMPUTE, RECOMPUTE_CHAIN, RECOMPUTE_CHAIN) * 2
    first, second = evaluate_decision(problem, decision).stages
    assert (first.recompute_s, second.recompute_s) == (3.0, 3.0)
    # 4 stage inputs; all residuals and inner inputs of one micro-batch; a cotangent that waits
    assert first.peak_bytes == second.peak_bytes + 10 == 4 * 10 + (3 * 100 + 2 * 10) + 10
