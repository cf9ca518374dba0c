"""What orders hold against what is counted for plans."""

from dataclasses import replace

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.planners.joint.order_list import Listing
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import given_lists
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import loads_of, placed, problem_of

RULES = [
    *(find_schedule(name) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")),
    Interleaved(chunks=3, split=True),
]


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_room_is_what_the_limit_leaves(schedule: Schedule) -> None:
    problem, decision = placed(problem_of(12, 3, 8), schedule)
    peaks = evaluate_decision(problem, decision).device_bytes
    order = schedule.tasks(3, 8)
    for over, fits in ((0, True), (-1, False)):
        tight = replace(problem_of(12, 3, 8), memory_limit_bytes=max(peaks) + over)
        assert loads_of(tight, schedule).fits(order) is fits


@pytest.mark.parametrize(
    "schedule", [find_schedule("zb-h1"), find_schedule("zb-v"), Interleaved(chunks=3, split=True)]
)
def test_an_order_of_its_own_is_over_by_what_is_counted_for_its_lists(schedule: Schedule) -> None:
    for times in (0.6, 0.8):
        problem, decision = placed(problem_of(12, 3, 8), schedule)
        problem = replace(
            problem, memory_limit_bytes=int(times * evaluate_decision(problem, decision).peak_bytes)
        )
        loads = Loads.of(problem, decision)
        order = Listing(loads, loads.room_bytes).order
        assert order is not None
        own = replace(problem, schedule=given_lists(order))
        limit = problem.memory_limit_bytes or 0
        rooms = zip(order, loads.rooms_bytes(order), strict=True)
        over = [loads.peak_bytes(tasks) - room for tasks, room in rooms]
        assert over == [size - limit for size in evaluate_decision(own, decision).device_bytes]


def test_a_kind_of_which_nobody_has_said_what_it_holds_is_refused() -> None:
    loads = loads_of(problem_of(12, 3, 8), find_schedule("1f1b"))
    with pytest.raises(KeyError):
        loads.peak_bytes([Task(0, kind, 0) for kind in (Kind.F, Kind.R, Kind.B)])
