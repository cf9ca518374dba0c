"""The clock of orders against the simulator, and what they hold against what is counted for plans."""

from dataclasses import replace

import pytest

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import clocked, lists_of, order_of
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import loads_of, placed, problem_of

RULES = [
    *(find_schedule(name) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")),
    Interleaved(chunks=3, split=True),
]


@pytest.mark.parametrize("link", [INFINITE, Link(4.0, 0.25)])
@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_the_clock_is_the_simulators(schedule: Schedule, link: Link) -> None:
    for seed, (devices, m) in enumerate([(1, 2), (2, 3), (3, 7), (4, 9)]):
        problem, decision = placed(problem_of(13, devices, m, seed, link=link), schedule)
        stages = evaluate(problem, decision).stages
        lists = schedule.tasks(devices, m)
        clock = clocked(loads_of(problem_of(13, devices, m, seed, link=link), schedule), order_of(lists))
        assert clock.step_s == pytest.approx(simulated_step_s(problem, stages))
        assert lists_of(order_of(lists)) == lists


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_room_is_what_the_limit_leaves(schedule: Schedule) -> None:
    problem, decision = placed(problem_of(12, 3, 8), schedule)
    peaks = evaluate(problem, decision).device_bytes
    order = order_of(schedule.tasks(3, 8))
    for over, fits in ((0, True), (-1, False)):
        tight = replace(problem_of(12, 3, 8), memory_limit_bytes=max(peaks) + over)
        assert loads_of(tight, schedule).fits(order) is fits


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_no_rule_is_under_the_bound(schedule: Schedule) -> None:
    for seed in range(4):
        loads = loads_of(problem_of(12, 4, 6, seed, link=Link(4.0)), schedule)
        assert clocked(loads, order_of(schedule.tasks(4, 6))).step_s >= loads.bound_s() - 1e-9


def test_steps_that_wait_for_each_other_are_stuck() -> None:
    loads = loads_of(problem_of(2, 2, 1), find_schedule("1f1b"))
    assert clocked(loads, [[(Kind.F, 0, 0), (Kind.B, 0, 0)], [(Kind.B, 1, 0), (Kind.F, 1, 0)]]).step_s == float("inf")
    assert clocked(loads, [[(Kind.B, 0, 0), (Kind.F, 0, 0)], [(Kind.F, 1, 0), (Kind.B, 1, 0)]]).stuck
    assert clocked(loads, [[(Kind.F, 0, 0), (Kind.B, 0, 0)], [(Kind.F, 1, 0), (Kind.W, 1, 0), (Kind.I, 1, 0)]]).stuck
