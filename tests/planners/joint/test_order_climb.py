"""Climbing: never slower, within the room, in the order of sums; as good as trying everything where
one can.
"""

from dataclasses import replace
from itertools import permutations, product

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.planners.joint.order_climb import climbed
from jvpipe.planners.joint.order_course import Course
from jvpipe.schedules import find_schedule
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import loads_of, problem_of

RULES = [find_schedule(name) for name in ("1f1b", "interleaved", "zb-h1", "v-half")]


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_orders_become_no_slower_and_stay_lawful(schedule: Schedule) -> None:
    for seed in range(3):
        loads = loads_of(problem_of(12, 3, 6, seed), schedule)
        order = schedule.tasks(3, 6)
        loads = replace(loads, room_bytes=tuple(map(loads.peak_bytes, order)))
        found = climbed(loads, order, 150)
        assert Course(loads, found).step_s <= Course(loads, order).step_s
        assert loads.fits(found)
        assert found == climbed(loads, order, 150)
        for tasks in found:
            for stage in {task.stage for task in tasks}:
                sums = [t.microbatch for t in tasks if t.stage == stage and t.kind in ("B", "W")]
                assert sums == list(range(6))


def test_two_devices_and_micro_batches_are_as_good_as_trying_everything() -> None:
    for seed in range(3):
        loads = loads_of(problem_of(4, 2, 2, seed), find_schedule("zb-h1"))
        order = find_schedule("zb-h1").tasks(2, 2)
        kinds = (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)
        first, second = (
            set(permutations([Task(s, kind, m) for kind in kinds[s] for m in range(2)]))
            for s in range(2)
        )
        every = [Course(loads, both).step_s for both in product(first, second)]
        assert Course(loads, climbed(loads, order, 400)).step_s <= min(every) + 1e-9
