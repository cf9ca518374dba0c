"""List scheduling: orders that run, keep their caps and the order of sums, and are fast where there
is room.
"""

import pytest

from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_list import Listing
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import loads_of, problem_of

RULES = [find_schedule(name) for name in ("1f1b", "interleaved", "zb-h1", "zb-v")] + [
    Interleaved(chunks=3, split=True)
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_orders_run_keep_caps_and_ascend(schedule: Schedule, eager: bool) -> None:
    for seed in range(3):
        for m in (1, 3, 8):
            loads = loads_of(problem_of(12, 4, m, seed), schedule)
            unit = [sum(loads.kept_bytes[s] for s in loads.stages_on(d)) for d in range(4)]
            for times in (1.0, 1.5, 4.0):
                order = Listing(loads, [times * x for x in unit], eager=eager).order
                assert order is not None
                assert Course(loads, order).step_s < float("inf")
                assert all(
                    loads.peak_bytes(steps) <= times * x
                    for steps, x in zip(order, unit, strict=True)
                )
                for tasks in order:
                    for stage in {task.stage for task in tasks}:
                        backwards = [
                            t.microbatch for t in tasks if t.stage == stage and t.kind in ("B", "I")
                        ]
                        sums = [
                            t.microbatch for t in tasks if t.stage == stage and t.kind in ("B", "W")
                        ]
                        assert backwards == sorted(sums) == list(range(m))
                        assert sums == backwards


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_the_clock_of_lists_is_that_of_courses(schedule: Schedule) -> None:
    for seed in range(3):
        loads = loads_of(problem_of(12, 4, 8, seed, link=Link(4.0, 0.25)), schedule)
        listing = Listing(loads, [1e9] * 4)
        assert listing.order is not None
        step_s = max(device.free_s for device in listing.devices)
        # Updates follow behind all steps, and are no matter of their order.
        assert step_s == pytest.approx(max(Course(loads, listing.order).ends))


def test_a_micro_batch_that_is_too_large_has_no_order() -> None:
    loads = loads_of(problem_of(4, 2, 2), find_schedule("interleaved"))
    assert Listing(loads, [loads.kept_bytes[0], 1e9]).order is None


def test_with_room_devices_that_are_alike_lose_only_what_fills_the_pipeline() -> None:
    loads = loads_of(problem_of(8, 2, 8, split=False), find_schedule("interleaved"))
    order = Listing(loads, [1e9] * 2).order
    assert order is not None
    assert Course(loads, order).step_s <= 1.1 * loads.bound_s()
