"""One micro-batch in flight, on every placement."""

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B, OneFOneB
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule


@pytest.mark.parametrize("placed", [ONE_F_ONE_B, Interleaved(), Interleaved(chunks=4), VSchedule()])
def test_a_micro_batch_has_been_all_the_way_before_the_next_one_begins(placed: Schedule) -> None:
    schedule, stages = one_by_one(placed), placed.stages_on(3)
    lists = schedule.tasks(3, 2)
    assert [schedule.device_of(s, 3) for s in range(stages)] == [
        placed.device_of(s, 3) for s in range(stages)
    ]
    assert schedule.in_flight(3, 2) == (1,) * stages
    for tasks in lists:
        mine = sorted({task.stage for task in tasks})
        trip = [(s, Kind.F) for s in mine] + [(s, Kind.B) for s in reversed(mine)]
        assert list(tasks) == [(s, kind, m) for m in range(2) for s, kind in trip]


def test_with_one_stage_per_device_it_is_1f1b_of_one_in_flight() -> None:
    assert one_by_one(ONE_F_ONE_B).tasks(3, 4) == OneFOneB(most=[1, 1, 1]).tasks(3, 4)
