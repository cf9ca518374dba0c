"""Several stages per device and backwards in halves, in the simulator: against a recursion over the
lists.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import ZBH1, Interleaved
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad
from tests.schedules.units import Clock

FAMILIES: list[Schedule] = [
    *(Interleaved(chunks=chunks, split=split) for chunks in (1, 2, 3) for split in (False, True)),
    *(ZBH1(), VSchedule(), VSchedule(memory="half"), VSchedule(memory="least")),
]
LOAD = st.builds(
    StageLoad,
    forward_s=st.integers(1, 4).map(float),
    backward_s=st.integers(1, 6).map(float),
    send_s=st.integers(0, 3).map(float),
    return_s=st.integers(0, 3).map(float),
    static_bytes=st.integers(0, 9),
    kept_bytes=st.integers(0, 9),
    input_s=st.integers(1, 4).map(float),
    weight_s=st.integers(1, 4).map(float),
    handed_bytes=st.integers(0, 9),
)
BYTES = ("static_bytes", "kept_bytes", "handed_bytes")
SECONDS = {Kind.F: "forward_s", Kind.B: "backward_s", Kind.I: "input_s", Kind.W: "weight_s"}


def step_s(lists: TaskLists, loads: Sequence[StageLoad]) -> float:
    """When the last task ends: each waits for the one before it on its device, and for what is
    sent, in order.
    """
    device = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    before = {task: tasks[i - 1] for tasks in lists for i, task in enumerate(tasks) if i}
    sent: dict[tuple[int, int], list[tuple[Task, float]]] = {}
    for tasks in lists:
        for task in tasks:
            to = task.stage + (1 if task.kind == "F" else -1)
            if task.kind != "W" and to in device and device[to] != device[task.stage]:
                load = loads[task.stage]
                seconds = load.send_s if task.kind == "F" else load.return_s
                sent.setdefault((device[task.stage], device[to]), []).append((task, seconds))

    @cache
    def ended(task: Task) -> float:
        ready = [ended(before[task])] if task in before else []
        ready += [there(task.stage - 1, (Kind.F,), task)] if task.kind == "F" and task.stage else []
        if task.kind in ("B", "I") and task.stage < len(loads) - 1:
            ready.append(there(task.stage + 1, (Kind.B, Kind.I), task))
        return max(ready, default=0.0) + getattr(loads[task.stage], SECONDS[task.kind])

    def there(stage: int, kinds: Sequence[Kind], task: Task) -> float:
        (source,) = {Task(stage, kind, task.microbatch) for kind in kinds} & {
            t for tasks in lists for t in tasks
        }
        if device[stage] == device[task.stage]:
            return ended(source)
        free = 0.0
        for one, seconds in sent[device[stage], device[task.stage]]:
            free = max(free, ended(one)) + seconds
            if one == source:
                break
        return free

    return max(ended(tasks[-1]) for tasks in lists)


def peaks(lists: TaskLists, loads: Sequence[StageLoad]) -> list[int]:
    """The most that each device holds, task by task."""
    found = []
    for tasks in lists:
        held = most = sum(loads[s].static_bytes for s in {task.stage for task in tasks})
        for s, kind, _ in tasks:
            kept, handed = loads[s].kept_bytes, loads[s].handed_bytes
            held += {"F": kept, "B": -kept, "I": handed - kept, "W": -handed}[kind]
            most = max(most, held)
        found.append(most)
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 4), st.integers(1, 7), st.data())
def test_seconds_and_bytes_are_those_of_the_recursion(
    schedule: Schedule, devices: int, m: int, data: st.DataObject
) -> None:
    loads = data.draw(
        st.lists(LOAD, min_size=schedule.chunks * devices, max_size=schedule.chunks * devices)
    )
    lists = schedule.tasks(devices, m)
    found = simulate_lists(lists, loads)
    assert found.step_s == step_s(lists, loads)
    assert list(found.peak_bytes) == [*peaks(lists, loads), 0]
    assert found.devices == devices


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 4), st.integers(1, 7), st.data())
def test_a_shared_link_and_swaps_delay_and_hold_nothing_more(
    schedule: Schedule, devices: int, m: int, data: st.DataObject
) -> None:
    V = schedule.chunks * devices
    loads = data.draw(st.lists(LOAD, min_size=V, max_size=V))
    lists = schedule.tasks(devices, m)
    plain = simulate_lists(lists, loads)
    assert simulate_lists(lists, loads, shared_link=True).step_s >= plain.step_s
    swapping = [
        replace(x, recompute_s=1.0, out_s=2.0, in_s=2.0, **dict.fromkeys(BYTES, 0), swapped_bytes=5)
        for x in loads
    ]
    swapped = simulate_lists(lists, swapping)
    held = [2 * 5 * schedule.chunks for _ in range(devices)]
    assert all(curve.most_bytes <= most for curve, most in zip(swapped.curves, held, strict=False))
    assert all(curve.bytes[-1] == 0 for curve in swapped.curves)


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-v", "v-half"])
def test_equal_stages_take_what_a_clock_says(name: str) -> None:
    schedule = find_schedule(name)
    clock = Clock(schedule.lists(4, 8), schedule.chunks, {"F": 1, "B": 2, "I": 1, "W": 1})
    share = 1 / schedule.chunks
    load = StageLoad(share, 2 * share, input_s=share, weight_s=share)
    found = simulate_lists(schedule.tasks(4, 8), [load] * 4 * schedule.chunks)
    assert found.step_s == float(clock.step)
    assert found.bubble_fraction == pytest.approx(1 - 24 / float(clock.step))


def test_a_second_chunk_on_the_last_device_is_reached_without_a_send() -> None:
    loads = [StageLoad(1.0, 1.0, send_s=5.0, return_s=5.0, input_s=1.0, weight_s=1.0)] * 4
    found = simulate_lists(VSchedule().tasks(2, 1), loads)
    assert found.busy_s["device 0 to 1"] == found.busy_s["device 1 to 0"] == 10.0
    assert (
        found.step_s == 4 + 4 * 5.0 + 5
    )  # four sends; I of the last three stages, W of one before I of another, B
