"""Seconds that plans take at least, against the simulator."""

from itertools import pairwise

import pytest

from jvpipe.planners.joint.unqueued import Load, least_steps_s
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE, Decision
from jvpipe.planners.model.stage_cost import evaluate, stage_cost
from tests.planners.joint.enumeration import tiny
from tests.planners.small import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulator_is_not_below(schedule: str) -> None:
    problem = tiny(0, schedule)
    for choices in ((0, 0, 0, 0), (1, 0, 1, 0), (2, RECOMPUTE, 1, 3)):
        for cut in (1, 2, 3):
            bounds = (0, cut, 4)
            stages = [
                stage_cost(problem, s, i, j, choices) for s, (i, j) in enumerate(pairwise(bounds))
            ]
            least_s = least_steps_s(problem, [Load.of_cost(stage, 3) for stage in stages])
            step_s = simulated_step_s(problem, evaluate(problem, Decision(bounds, choices)).stages)
            assert least_s[0] == least_s[2]
            assert 0 < least_s[0] <= step_s * (1 + 1e-9)
