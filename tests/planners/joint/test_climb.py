"""The climb by neighbors, against all plans of few layers."""

from dataclasses import replace

import numpy as np
import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from tests.planners.joint.enumeration import tiny
from tests.planners.small import SCHEDULES, chain, limited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_that_keep_all_are_cut_where_the_simulator_is_fastest(schedule: str) -> None:
    problem = limited(tiny(2, schedule, layers=7), None)
    every = [Decision.keeping_all((0, cut, 7)) for cut in range(1, 7)]
    steps = [
        simulated_step_s(problem, evaluate_decision(problem, decision).stages) for decision in every
    ]
    best = Climb(problem, (), 10_000).top([every[0]])
    assert best is not None
    assert simulated_step_s(problem, evaluate_decision(problem, best).stages) == pytest.approx(
        min(steps)
    )


def test_it_stops_when_its_tasks_are_spent_and_never_gets_worse() -> None:
    problem = tiny(3)
    begin, ranks = solve(problem, pricing_of(problem)).decision(), []
    for tasks in (1, 200, 10_000):
        climb = Climb(problem, [DeviceFates.of(problem, swaps=True)], tasks)
        best = climb.top([begin])
        assert best is not None
        ranks.append(climb.rank(best))
    assert ranks == sorted(ranks, reverse=True)
    assert np.isfinite(ranks[0][0])


def test_a_plan_over_a_limit_ranks_last_and_is_no_answer() -> None:
    problem = replace(tiny(3), memory_limit_bytes=1)
    climb, plan = Climb(problem, (), 10), Decision.keeping_all((0, 2, 4))
    assert climb.rank(plan)[0] == np.inf
    assert climb.top([plan]) is None
    assert climb.tasks == 10


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_is_computed_again_is_made_a_run_where_cotangents_are_awaited(schedule: str) -> None:
    """Of two layers the first then runs again before the cotangents are there: of three stages
    before the last one.
    """
    options = Option(100), Option(0, extra_s=1.0, extra_bytes=100)
    layers = [LayerCost("block", 1.0, 2.0, options, input_bytes=1)] * 8
    problem = chain(layers, 4, 4, schedule, memory_limit_bytes=260)
    found = jvpipe(problem)
    assert found.choices[:4] == (RECOMPUTE, RECOMPUTE_CHAIN) * 2
    apart = replace(found, choices=tuple(RECOMPUTE if c < 0 else c for c in found.choices))
    run_s, apart_s = (
        simulated_step_s(problem, evaluate_decision(problem, one).stages) for one in (found, apart)
    )
    assert run_s == apart_s - 3
