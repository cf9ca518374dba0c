"""What a planner that finds nothing says."""

import re
from dataclasses import replace

import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.asking import ask
from jvpipe.papers.limits import plan_or_raise
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule
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
        Infeasible,
        match=r"halves finds no plan under the limit of 300 bytes .* 401 bytes, .* stage 0 is",
    ) as error:
        plan_or_raise(limited(problem, 300), "halves", keeping_halves)
    assert error.value.smallest_limit_bytes == 401
    assert plan_or_raise(limited(problem, 401), "halves", keeping_halves).bounds == (0, 2, 4)


@pytest.mark.parametrize(
    ("planner", "schedule"),
    [
        ("jvpipe", "1f1b"),
        ("jvpipe", "v-half"),
        ("jvpipe", "auto"),
        ("dapple", "1f1b"),
        ("vpipe", "1f1b"),
    ],
)
def test_of_unlike_limits_the_bytes_are_named_that_would_do_on_each(
    planner: str, schedule: str
) -> None:
    problem = chain([LayerCost("a", 1.0, 1.0, (Option(100),), parameter_bytes=9)] * 4, 2, 2)
    problem = replace(
        problem, schedule=find_schedule(schedule), stages=4 if schedule == "v-half" else 2
    )
    limits = [10**6, 10]
    with pytest.raises(Infeasible) as error:
        ask(planner, problem.told_apart([(), ()], limits))
    told = re.search(r"(\d+) bytes more on each device", str(error.value))
    assert told
    assert error.value.smallest_limit_bytes == limits[0] + int(told[1])
    assert "per device" not in str(error.value)
    ask(planner, problem.told_apart([(), ()], [limit + int(told[1]) for limit in limits]))


def test_an_answer_is_passed_on() -> None:
    problem = chain([LayerCost("a", 1.0, 1.0, (Option(100),))] * 4, 2)
    assert plan_or_raise(problem, "halves", keeping_halves) == Decision((0, 2, 4), (0, 0, 0, 0))
