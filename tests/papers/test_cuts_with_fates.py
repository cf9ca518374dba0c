"""The planners that choose cuts and fates together, vPipe's and DawnPiper's, against the best
decisions there are.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from jvpipe.papers.dawnpiper import dawnpiper
from jvpipe.papers.vpipe import vpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.small import best_bottleneck_s, checked_bottleneck_s, large, limited, problems

Decide = Callable[[Problem], Decision]
both = pytest.mark.parametrize("decide", [vpipe, dawnpiper])


@both
@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=problems())
def test_decisions_fit_and_are_near_the_best(decide: Decide, problem: Problem) -> None:
    found_s = checked_bottleneck_s(decide, problem)
    if found_s is not None:
        best_s = best_bottleneck_s(problem)
        assert best_s <= found_s * (1 + 1e-9) <= 2 * best_s


@both
@settings(max_examples=20, deadline=None)
@given(problem=problems())
def test_the_host_limit_holds(decide: Decide, problem: Problem) -> None:
    problem = limited(problem, problem.memory_limit_bytes, host_limit_bytes=40)
    try:
        decision = decide(problem)
    except Infeasible:
        return
    assert sum(stage.host_bytes for stage in evaluate_decision(problem, decision).stages) <= 40


@both
def test_a_hundred_layers_on_eight_stages_fit(decide: Decide) -> None:
    problem = large("1f1b", 0.5)
    limit = problem.memory_limit_bytes
    assert limit is not None
    assert evaluate_decision(problem, decide(problem)).peak_bytes <= limit
