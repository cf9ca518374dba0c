"""The surrogate's best paths, against all plans."""

from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.effort import PLAN
from jvpipe.planners.joint.surrogate import pricing_of, solve, trips, within_host_limit
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.joint.enumeration import every_decision, tiny
from tests.planners.small import SCHEDULES, limited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_plan_that_fits_is_faster_by_the_surrogate(schedule: str) -> None:
    problem = tiny(2, schedule, layers=3)
    limit = problem.memory_limit_bytes or 0
    evaluations = (evaluate_decision(problem, decision) for decision in every_decision(problem))
    least_s = min(x.step_s for x in evaluations if x.peak_bytes <= limit)
    solution = solve(problem, pricing_of(problem))
    ours = evaluate_decision(problem, solution.decision())
    assert ours.peak_bytes <= limit
    assert solution.bound_s * (1 - 1e-9) <= ours.step_s == pytest.approx(least_s)


def test_a_host_limit_is_shared_out_or_nothing_is_swapped() -> None:
    problem = replace(tiny(1, "gpipe", share=0.3), host=Link(100.0), peer_uses_host=False)
    free = solve(problem, pricing_of(problem))
    swapped = sum(stage.host_bytes for stage in evaluate_decision(problem, free.decision()).stages)
    assert swapped > 0
    for host in (0, swapped // 2, swapped):
        tight = limited(problem, problem.memory_limit_bytes, host)
        solution = within_host_limit(tight, free)
        if solution.feasible:
            assert (
                sum(
                    stage.host_bytes
                    for stage in evaluate_decision(tight, solution.decision()).stages
                )
                <= host
            )


def test_plans_of_short_round_trips_fit() -> None:
    problem = tiny(3)
    decisions = trips(problem, pricing_of(problem))
    assert 0 < len(decisions) <= PLAN.paths
    assert all(
        evaluate_decision(problem, decision).peak_bytes <= (problem.memory_limit_bytes or 0)
        for decision in decisions
    )
