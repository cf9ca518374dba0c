"""The seconds that a step spends on copies of optimizer state."""

from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Link
from jvpipe.ir.plan import Fate, Plan, Stage
from jvpipe.planners.state_on_host import away_s
from jvpipe.schedules import find_schedule
from tests.planners.joint.orders import problem_of


@pytest.mark.parametrize(
    ("schedule", "updates"), [("1f1b", 1), ("pipedream", 8), ("2bw", 1), ("gpipe", 1)]
)
def test_state_is_copied_once_per_update_by_the_device_with_the_most(
    schedule: str, updates: int
) -> None:
    problem = problem_of(4, 2, 8, 0, link=Link(8.0))
    problem = replace(problem, schedule=find_schedule(schedule), host=Link(10.0))
    away = {"a": Fate.SWAP, "b": Fate.KEEP}
    plan = Plan((Stage((0, 1), (0,), state_fates=away), Stage((2, 3), (1,), state_fates=away)))
    assert away_s(plan, {"a": 30, "b": 500}, problem) == pytest.approx(updates * 3.0)
