"""Simulated steps of stages of several devices, by hand."""

import pytest

from jvpipe.cost.hardware import INFINITE
from jvpipe.planners.model.problem import Group, Problem
from jvpipe.planners.model.stage_bytes import StageBytes
from jvpipe.planners.model.stage_cost import StageCost
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.planners.joint.shapes import chain, layer

COSTS = chain([layer(1.0)] * 4, [8] * 3).costs[0]


def stage(
    reduce_s: float = 0.0, comm_s: float = 0.0, forward_s: float = 1.0, backward_s: float = 2.0
) -> StageCost:
    """A stage that takes so long, and no room."""
    nothing = StageBytes(1, 0, 0, 0, 0)
    return StageCost(forward_s, backward_s, 0.0, 0.0, comm_s, 0.0, nothing, 1, (1.0, 1.0), reduce_s)


def problem(*machines: tuple[int, ...], microbatches: int = 4, schedule: str = "1f1b") -> Problem:
    """Places whose devices are on these machines."""
    groups = tuple(
        Group((2 * p, 2 * p + 1), machines=there, receives=INFINITE)
        for p, there in enumerate(machines)
    )
    return Problem(COSTS, len(groups), find_schedule(schedule), microbatches, groups=groups)


def test_one_stage_is_its_work_and_its_all_reduce() -> None:
    assert simulated_step_s(problem((0, 1)), [stage(5.0)]) == 4 * 3 + 5


def test_the_all_reduce_of_a_later_stage_hides_behind_the_backwards_before_it() -> None:
    def step_s(first: float, last: float) -> float:
        return simulated_step_s(problem((), ()), [stage(first), stage(last)])

    assert step_s(0.0, 0.0) == 15
    assert step_s(0.0, 2.0) == 15
    assert step_s(0.0, 5.0) == 15 + 3
    assert step_s(4.0, 5.0) == 15 + 4


def test_stages_that_share_a_network_reduce_one_after_the_other() -> None:
    stages = [stage(10.0)] * 2
    assert simulated_step_s(problem((0, 0), (1, 1)), stages) == 15 + 10
    # the last stage's begins 2 s before the first one's, which waits for it
    assert simulated_step_s(problem((0, 1), (0, 1)), stages) == 13 + 20


def test_transfers_between_machines_wait_for_each_other_on_their_networks() -> None:
    # Where stages 0 and 2 are on one machine, its network carries what both send.
    stages = [stage(), *[stage(comm_s=8.0, backward_s=1.0)] * 3]
    apart, shared = (
        simulated_step_s(problem(*machines, microbatches=8), stages)
        for machines in (((0,), (1,), (2,), (3,)), ((0,), (1,), (0,), (1,)))
    )
    assert apart < shared


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_under_other_schedules_too_gradients_are_reduced_after_the_last_backward(
    schedule: str,
) -> None:
    one = problem((), (), schedule=schedule)
    plain_s = simulated_step_s(one, [stage(), stage()])
    assert simulated_step_s(one, [stage(7.0), stage()]) == plain_s + 7


def test_a_place_of_several_stages_reduces_each_of_them() -> None:
    groups = problem((), ()).groups
    one = Problem(COSTS, 4, find_schedule("interleaved"), 4, groups=groups)
    plain_s = simulated_step_s(one, [stage()] * 4)
    assert simulated_step_s(one, [stage(7.0), *[stage()] * 3]) == plain_s + 7
