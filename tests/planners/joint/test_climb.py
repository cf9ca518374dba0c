"""The search by neighbours, against all plans of few layers."""

from dataclasses import replace

import numpy as np
import pytest

from jvpipe.planners.joint.local_search import LocalSearch
from jvpipe.planners.joint.segment_table import Effort
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.stage_cost import evaluate
from tests.planners.joint.enumeration import tiny
from tests.planners.small import SCHEDULES, limited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_that_keep_all_are_cut_where_the_simulator_is_fastest(schedule: str) -> None:
    problem = limited(tiny(2, schedule, layers=7), None)
    pricing = pricing_of(problem)
    search = LocalSearch(
        problem, (pricing,), (solve(problem, pricing).table.best_prices(),), Effort(), 100, 100
    )
    every = [Decision.keeping_all((0, cut, 7)) for cut in range(1, 7)]
    steps = [simulated_step_s(problem, evaluate(problem, decision).stages) for decision in every]
    best = search.top([every[0]])
    assert simulated_step_s(problem, evaluate(problem, best).stages) == pytest.approx(min(steps))


def test_it_stops_when_its_steps_are_spent_and_never_gets_worse() -> None:
    problem = tiny(3)
    pricing = pricing_of(problem)
    hints = solve(problem, pricing).table.best_prices()
    begin, ranks = solve(problem, pricing).decision(), []
    for steps in (1, 5, 60):
        search = LocalSearch(problem, (pricing,), (hints,), Effort(), 100, steps)
        ranks.append(search.rank(search.top([begin])))
    assert ranks == sorted(ranks, reverse=True)
    assert np.isfinite(ranks[0][0])


def test_a_plan_over_a_limit_ranks_last() -> None:
    problem = replace(tiny(3), memory_limit_bytes=1)
    pricing = pricing_of(problem)
    search = LocalSearch(problem, (pricing,), ({},), Effort(), 10, 10)
    assert search.rank(Decision.keeping_all((0, 2, 4)))[0] == np.inf
    assert search.steps == 10
