"""One order of dispatch for all stages."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists, text
from jvpipe.lowering.order import dispatch_order
from jvpipe.schedules.gpipe import gpipe
from jvpipe.schedules.one_f_one_b import one_f_one_b


def straight(lists: TaskLists, seconds: list[int], devices: list[int]) -> list[Task]:
    """The order of a straight pipeline whose backwards take twice as long as its forwards."""
    last = len(lists) - 1

    def waits_for(task: Task) -> Iterable[Task]:
        if task.kind == "F":
            return [Task(task.stage - 1, Kind.F, task.microbatch)] * (task.stage > 0)
        return [
            task._replace(stage=task.stage + 1) if task.stage < last else task._replace(kind="F")
        ]

    return dispatch_order(
        lists,
        waits_for,
        lambda t: seconds[t.stage] * (1 if t.kind == "F" else 2),
        lambda t: devices[t.stage],
    )


def test_dispatches_by_time() -> None:
    order = straight(one_f_one_b(2, 3), [1, 1], [0, 1])
    assert text(order) == "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2"


def test_a_slow_stage_is_dispatched_less_often() -> None:
    order = straight(gpipe(2, 3), [1, 3], [0, 1])
    assert text(order[:6]) == "0F0 0F1 1F0 0F2 1F1 1F2"


def test_stages_on_one_device_take_turns() -> None:
    order = straight(one_f_one_b(2, 2), [1, 1], [0, 0])
    assert text(order) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([gpipe, one_f_one_b]),
    microbatches=st.integers(1, 6),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=5),
)
def test_keeps_the_lists_and_what_they_wait_for(
    schedule: Callable[[int, int], TaskLists], microbatches: int, stages: list[tuple[int, int]]
) -> None:
    lists = schedule(len(stages), microbatches)
    order = straight(lists, [s for s, _ in stages], [d for _, d in stages])
    place = {task: i for i, task in enumerate(order)}
    assert len(order) == len(place) == sum(map(len, lists))
    for tasks in lists:
        assert [place[t] for t in tasks] == sorted(place[t] for t in tasks)
    for task in order:
        if task.kind == "F" and task.stage > 0:
            assert place[task] > place[task._replace(stage=task.stage - 1)]
        if task.kind == "B":
            later = task._replace(stage=task.stage + 1)
            assert (
                place[task]
                > place[later if task.stage < len(stages) - 1 else task._replace(kind="F")]
            )


def test_lists_that_cannot_progress_are_refused() -> None:
    lists = ((Task(0, Kind.F, 0), Task(0, Kind.B, 0)), (Task(1, Kind.B, 0), Task(1, Kind.F, 0)))
    with pytest.raises(ValueError, match=r"cannot progress: 0B0 waits for 1B0; 1B0 waits for 1F0"):
        dispatch_order(
            lists,
            lambda t: (
                [Task(1, Kind.B, 0)]
                if t == Task(0, Kind.B, 0)
                else [Task(1, Kind.F, 0)]
                if t == Task(1, Kind.B, 0)
                else []
            ),
            lambda t: 1.0,
            lambda t: t.stage,
        )
