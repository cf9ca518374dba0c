"""Lists that a plan holds: read as they were written, and placed as the schedule that they come
from.
"""

import pytest

from jvpipe.schedules import SCHEDULES, find_schedule
from jvpipe.schedules.auto import given_lists, read_lines


@pytest.mark.parametrize(
    "name", [name for name, schedule in SCHEDULES.items() if schedule.synchronous]
)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_plans_lists_are_a_schedule(name: str, devices: int) -> None:
    schedule = find_schedule(name)
    lists = schedule.tasks(devices, 5)
    found = given_lists(lists)
    assert found.tasks(devices, 5) == lists
    assert found.held(devices, 5) == schedule.held(devices, 5)
    stages = range(schedule.stages_on(devices))
    assert [found.device_of(s, devices) for s in stages] == [
        schedule.device_of(s, devices) for s in stages
    ]
    assert found == given_lists(lists)


def test_lists_are_for_one_number_of_devices_and_microbatches() -> None:
    found = given_lists(find_schedule("zb-v").tasks(2, 3))
    with pytest.raises(
        ValueError, match="the plan's lists are for 2 devices and 3 micro-batches, not for 2 and 4"
    ):
        found.lists(2, 4)
    with pytest.raises(ValueError, match="stages must go round the devices"):
        given_lists(read_lines(("1F0 1B0", "0F0 0B0")))


def test_auto_is_1f1b_before_there_is_a_plan() -> None:
    assert find_schedule("auto").lists(3, 4) == find_schedule("1f1b").lists(3, 4)
