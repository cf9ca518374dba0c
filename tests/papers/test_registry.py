"""The registry of planners, and the facade's way to them."""

import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import check
from jvpipe.schedules import SCHEDULES, find_schedule
from tests.grid import grid

SECONDS = [3.0, 1.0, 2.0, 2.0, 1.0, 4.0, 1.0, 2.0]
COSTS = Costs(
    tuple(
        LayerCost(f"layer{i}", s, 2 * s, (Option(10),), 4, 4, 8, 3) for i, s in enumerate(SECONDS)
    )
)


@pytest.mark.parametrize("schedule", grid(SCHEDULES, "gpipe", "interleaved", "zb-v", "2bw"))
@pytest.mark.parametrize("planner", [planner.name for planner in PLANNERS])
def test_every_planner_gives_a_plan_that_passes_the_validator(planner: str, schedule: str) -> None:
    for stages in (
        stages for stages in (1, 2, 3, 4, 8) if stages % find_schedule(schedule).chunks == 0
    ):
        problem = Problem(COSTS, stages, find_schedule(schedule), microbatches=8)
        decision = find_planner(planner).decide(problem)
        check(problem, decision)
        plan = decision.plan(problem, planner)
        plan.check(len(SECONDS), stages)
        assert (plan.planner, plan.schedule, len(plan.stages)) == (planner, schedule, stages)


def test_an_unknown_planner_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown planner 'torchgpip': did you mean 'torchgpipe'"):
        find_planner("torchgpip")


@pytest.mark.parametrize("stages", [0, 9])
def test_stages_out_of_range_are_refused(stages: int) -> None:
    with pytest.raises(
        ValueError, match=f"{stages} stages: there can be 1 to 8, as many as the model has layers"
    ):
        Problem(COSTS, stages, find_schedule("1f1b"), 8)
