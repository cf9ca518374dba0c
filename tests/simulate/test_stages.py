"""Stages in the simulator: against timelines drawn by hand, textbook numbers, and a clock that
ticks.
"""

import re
from collections.abc import Callable
from importlib import import_module
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.gpipe import gpipe
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad, stage_work
from jvpipe.simulate.work_parts import Features
from tests.schedules.drawing import parse
from tests.schedules.test_gpipe import FOUR as GPIPE_FOUR
from tests.schedules.ticks import Name, Ticks

Lists = Callable[[int, int], TaskLists]


def starts(lists: TaskLists, loads: list[StageLoad], *, shared: bool = False) -> dict[Name, float]:
    """When each task starts, those left out that take no time."""
    parts_s = [load.parts_s for load in loads]
    found = stage_work(lists, Features.of(parts_s, shared=shared))
    taken = found.work.starts_s(found.seconds(parts_s))
    return {name: taken[i] for name, i in found.ids.items()}


def whole(load: st.SearchStrategy[int]) -> st.SearchStrategy[float]:
    return load.map(float)


LOADS = st.builds(
    StageLoad,
    forward_s=whole(st.integers(1, 4)),
    backward_s=whole(st.integers(1, 6)),
    recompute_s=whole(st.sampled_from([0, 0, 1, 3])),
    out_s=whole(st.sampled_from([0, 0, 1, 5])),
    in_s=whole(st.sampled_from([0, 0, 1, 5])),
    send_s=whole(st.integers(0, 3)),
    return_s=whole(st.integers(0, 3)),
    static_bytes=st.integers(0, 9),
    kept_bytes=st.integers(0, 9),
    swapped_bytes=st.integers(0, 9),
)
SCHEDULES = st.sampled_from([gpipe, one_f_one_b])


@pytest.mark.parametrize(("lists", "drawing"), [(gpipe, GPIPE_FOUR), (one_f_one_b, "")])
def test_runs_as_drawn(lists: Lists, drawing: str) -> None:
    drawing = drawing or str(import_module("jvpipe.schedules.one_f_one_b").__doc__)
    drawn = parse(drawing)
    stages = 1 + max(task.stage for task in drawn)
    found = starts(lists(stages, 4), [StageLoad(1.0, 1.0)] * stages)
    assert {Task(s, Kind(kind), m): start for (s, kind, m), start in found.items()} == drawn


@pytest.mark.parametrize("lists", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("S", "M"), [(1, 1), (1, 5), (2, 2), (4, 8), (5, 3), (8, 32)])
def test_equal_stages_take_the_textbook_time(lists: Lists, S: int, M: int) -> None:
    f, b = 1.0, 2.0
    found = simulate_lists(lists(S, M), [StageLoad(f, b)] * S)
    assert found.step_s == (M + S - 1) * (f + b)
    assert found.bubble_fraction == pytest.approx((S - 1) / (M + S - 1))
    assert found.busy_s["stage 0"] == M * (f + b)


@settings(max_examples=60, deadline=None)
@given(
    lists=SCHEDULES,
    loads=st.lists(LOADS, min_size=1, max_size=4),
    M=st.integers(1, 6),
    shared=st.booleans(),
)
def test_equals_a_ticking_clock(lists: Lists, loads: list[StageLoad], M: int, shared: bool) -> None:
    tasks = lists(len(loads), M)
    clock = Ticks(tasks, loads, shared=shared)
    found = starts(tasks, loads, shared=shared)
    assert found == {name: clock.start[name] for name in found}
    assert simulate_lists(tasks, loads, shared_link=shared).step_s == max(clock.end.values())


@settings(max_examples=60, deadline=None)
@given(
    lists=SCHEDULES,
    loads=st.lists(LOADS, min_size=1, max_size=4),
    M=st.integers(1, 6),
    shared=st.booleans(),
)
def test_two_swapped_copies_at_most(
    lists: Lists, loads: list[StageLoad], M: int, shared: bool
) -> None:
    tasks = lists(len(loads), M)
    found = simulate_lists(tasks, loads, shared_link=shared)
    *devices, host = found.curves
    outside = 0
    for load, row, curve in zip(loads, tasks, devices, strict=True):
        most = max(accumulate(1 if task.kind == "F" else -1 for task in row))
        limit = load.static_bytes + most * load.kept_bytes + min(most, 2) * load.swapped_bytes
        assert curve.most_bytes <= limit
        assert curve.bytes[-1] == load.static_bytes
        outside += most * load.swapped_bytes
    assert host.bytes[-1] == 0
    assert host.most_bytes <= outside
    assert found.peak_bytes == tuple(curve.most_bytes for curve in found.curves)


def test_what_the_next_task_needs_is_not_swapped() -> None:
    loads = [StageLoad(1.0, 1.0, out_s=1.0, in_s=1.0)] * 2
    assert {s for s, kind, _ in starts(one_f_one_b(2, 4), loads) if kind in ("OUT", "IN")} == {0}


def test_kept_bytes_grow_with_what_is_in_flight() -> None:
    loads = [StageLoad(1.0, 1.0, static_bytes=100, kept_bytes=10)] * 3
    assert simulate_lists(one_f_one_b(3, 8), loads).peak_bytes == (130, 120, 110, 0)
    assert simulate_lists(gpipe(3, 8), loads).peak_bytes == (180, 180, 180, 0)


def test_a_shared_link_delays_a_send_behind_a_swap() -> None:
    loads = [
        StageLoad(1.0, 1.0, out_s=4.0, in_s=4.0, send_s=1.0),
        StageLoad(1.0, 1.0, return_s=1.0),
    ]
    apart, shared = (starts(one_f_one_b(2, 2), loads, shared=shared) for shared in (False, True))
    assert (apart[0, "OUT", 0], apart[0, "SEND", 0], apart[1, "F", 0]) == (1.0, 1.0, 2.0)
    assert (shared[0, "OUT", 0], shared[0, "SEND", 0], shared[1, "F", 0]) == (1.0, 5.0, 6.0)


def test_a_swap_waits_for_the_backward_before_its_own_to_begin() -> None:
    loads = [StageLoad(1.0, 5.0, out_s=1.0, in_s=1.0)]
    found = starts(gpipe(1, 3), loads)
    assert [found[0, "IN", m] for m in range(3)] == [4.0, 5.0, 10.0]
    assert [found[0, "B", m] for m in range(3)] == [5.0, 10.0, 15.0]


def test_what_is_computed_again_is_there_before_the_cotangents() -> None:
    found = simulate_lists(gpipe(2, 1), [StageLoad(1.0, 2.0, recompute_s=1.0)] * 2)
    assert [(span.name, span.start_s, span.end_s) for span in found.spans()] == [
        ("0F0", 0.0, 1.0),
        ("0R0", 1.0, 2.0),
        ("0B0", 5.0, 7.0),
        ("1F0", 1.0, 2.0),
        ("1R0", 2.0, 3.0),
        ("1B0", 3.0, 5.0),
    ]


@pytest.mark.parametrize("lists", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("S", "M", "step_s"), [(8, 4, 37), (8, 32, 149), (16, 32, 173)])
def test_equal_stages_compute_again_in_their_turns_alone(
    lists: Lists, S: int, M: int, step_s: int
) -> None:
    """M (F + R + B) on a device, and (S - 1) (F + B) before and after: torchgpipe's section 2.1."""
    assert simulate_lists(lists(S, M), [StageLoad(1.0, 2.0, recompute_s=1.0)] * S).step_s == step_s


def refused(rows: list[str], why: str) -> None:
    lists = tuple(tuple(Task.parse(text) for text in row.split()) for row in rows)
    with pytest.raises(ValueError, match=re.escape(why)):
        simulate_lists(lists, [StageLoad(1.0, 1.0)] * len(rows))


def test_lists_that_cannot_run_are_refused_with_the_reason() -> None:
    refused(["0F0 0B0", "1B0 1F0"], "cannot progress: 1F0 waits for 1B0; 1B0 waits for 1F0")
    refused(
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        "0B0 waits for 1B0; 1B0 waits for 1F1; 1F1 waits for 0F1; 0F1",
    )
    refused(["0F0 0B0", "1F0"], "0B0 waits for 1B0, which is in no list")
    refused(["0F0 0F0"], "0F0 is twice")
    refused(["0F0 0U0 0R0"], "task 0R0: lists at the level of stages hold F, B, I, W and U")
