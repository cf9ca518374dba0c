"""The engine: waiting, turns on resources, and circles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.simulate.task_graph import TaskGraph


def test_a_device_keeps_its_order_even_if_a_later_task_is_ready() -> None:
    work = TaskGraph([[], [0], []], [(0,), (1,), (1,)], in_order=[0, 1])
    assert work.starts_s([5.0, 1.0, 1.0]) == [0.0, 5.0, 6.0]


def test_a_link_serves_who_is_ready_first_and_of_equals_the_lower_number() -> None:
    work = TaskGraph([[], [0], [], []], [(0,), (1,), (1,), (1,)], in_order=[0])
    assert work.starts_s([5.0, 1.0, 2.0, 2.0]) == [0.0, 5.0, 0.0, 2.0]


def test_a_task_on_two_links_holds_both_from_its_start() -> None:
    work = TaskGraph([[], [], []], [(0,), (0, 1), (1,)], in_order=[])
    assert work.starts_s([3.0, 2.0, 1.0]) == [0.0, 3.0, 5.0]


def test_a_task_of_no_seconds_does_not_queue() -> None:
    work = TaskGraph([[], [], [1]], [(0,), (0,), (1,)], in_order=[1])
    assert work.starts_s([4.0, 0.0, 1.0]) == [0.0, 0.0, 0.0]


def test_tasks_without_resources_disturb_nobody() -> None:
    assert TaskGraph([[], [], [0, 1]], [(), (), ()], in_order=[]).starts_s([4.0, 2.0, 1.0]) == [
        0.0,
        0.0,
        4.0,
    ]


def test_no_tasks_take_no_time() -> None:
    assert TaskGraph([], [], in_order=[]).starts_s([]) == []


def test_a_circle_is_named_task_by_task() -> None:
    names = ["0B0", "1B0", "1F0", "other"]
    with pytest.raises(ValueError, match=r"cannot progress: 0B0 waits for 1B0; 1B0 waits for 0B0$"):
        TaskGraph([[1], [0], [1], []], [(), (), (), ()], in_order=[], name=names.__getitem__)
    with pytest.raises(ValueError, match=r"cannot progress: 1B0 waits for 1F0; 1F0 waits for 1B0$"):
        TaskGraph([[], [2], [], []], [(0,), (1,), (1,), ()], in_order=[1], name=names.__getitem__)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), n=st.integers(1, 12))
def test_many_runs_at_once_equal_each_alone(data: st.DataObject, n: int) -> None:
    waits = [
        data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(n)
    ]
    occupies = [(data.draw(st.integers(0, 2)),) for _ in range(n)]
    work = TaskGraph(waits, occupies, in_order=range(3))
    seconds = [[float(data.draw(st.integers(0, 9))) for _ in range(n)] for _ in range(3)]
    assert work.many_starts_s(np.array(seconds).T).T.tolist() == [
        work.starts_s(run) for run in seconds
    ]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), n=st.integers(1, 12))
def test_nobody_starts_early_and_no_resource_does_two_things(data: st.DataObject, n: int) -> None:
    waits = [
        data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(n)
    ]
    occupies = [
        tuple(data.draw(st.lists(st.integers(0, 3), max_size=2, unique=True))) for _ in range(n)
    ]
    seconds = [float(data.draw(st.integers(1, 5))) for _ in range(n)]
    starts = TaskGraph(waits, occupies, in_order=[0, 1]).starts_s(seconds)
    ends = [a + b for a, b in zip(starts, seconds, strict=True)]
    assert all(starts[i] >= ends[j] for i, needs in enumerate(waits) for j in needs)
    for r in range(4):
        mine = [i for i in range(n) if r in occupies[i]]
        for i in mine:
            assert all(starts[j] >= ends[i] or starts[i] >= ends[j] for j in mine if j != i)
        if r < 2:
            assert [starts[i] for i in mine] == sorted(starts[i] for i in mine)
