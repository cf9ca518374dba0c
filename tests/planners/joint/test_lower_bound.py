"""The bound that no plan is below, against all plans."""

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import every_decision, tiny
from tests.planners.small import SCHEDULES, limited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_plan_that_fits_is_below_the_bound(schedule: str) -> None:
    problem = tiny(1, schedule, layers=3)
    evaluations = (evaluate_decision(problem, decision) for decision in every_decision(problem))
    steps = [
        simulated_step_s(problem, x.stages)
        for x in evaluations
        if x.peak_bytes <= (problem.memory_limit_bytes or 0)
    ]
    assert 0 < lower_bound(problem) <= min(steps) * (1 + 1e-9)


def test_where_nothing_fits_it_is_infinite() -> None:
    assert lower_bound(limited(tiny(0), 1)) == np.inf


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "zb-h1"])
def test_layers_that_take_no_time_have_the_bound_zero_on_unlike_devices(schedule: str) -> None:
    costs = Costs((LayerCost("block", 0.0, 0.0, (Option(10),)),) * 6)
    problem = Problem(costs, 4, find_schedule(schedule), microbatches=4)
    assert lower_bound(problem.told_apart([()] * 4, [900, 600, 500, 400])) == 0
