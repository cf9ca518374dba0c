"""What a planner that finds nothing says."""

import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.limits import plan_or_raise
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.small import chain, limited


def keeping_halves(problem: Problem) -> Decision | None:
    """A planner that keeps everything and cuts in the middle."""
    n = len(problem.costs.layers)
    decision = Decision.keeping_all([0, n // 2, n])
    limit = problem.memory_limit_bytes
    return (
        decision
        if limit is None or evaluate_decision(problem, decision).peak_bytes <= limit
        else None
    )


def test_the_limit_that_it_names_would_do() -> None:
    problem = chain([LayerCost("a", 1.0, 1.0, (Option(100),))] * 4, 2)
    with pytest.raises(
        Infeasible, match=r"halves finds no plan under 300 bytes .* 101 more .* stage 0 is"
    ) as error:
        plan_or_raise(limited(problem, 300), "halves", keeping_halves)
    assert error.value.smallest_limit_bytes == 401
    assert plan_or_raise(limited(problem, 401), "halves", keeping_halves).bounds == (0, 2, 4)


def test_an_answer_is_passed_on() -> None:
    problem = chain([LayerCost("a", 1.0, 1.0, (Option(100),))] * 4, 2)
    assert plan_or_raise(problem, "halves", keeping_halves) == Decision((0, 2, 4), (0, 0, 0, 0))
