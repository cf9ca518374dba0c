"""Spliced lists: every task is its own plan's, and what was in order stays so."""

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, text
from jvpipe.lowering.splice import spliced
from jvpipe.schedules import find_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream", "2bw"])
@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (2, 4), (4, 2), (3, 3)])
def test_each_micro_batch_has_the_tasks_of_its_plan(name: str, old: int, new: int) -> None:
    schedule, M = find_schedule(name), 8
    before, after = (
        schedule.with_updates(S, M) if not schedule.synchronous else schedule.lists(S, M)
        for S in (old, new)
    )
    for start in range(M + 1):
        lists = spliced(before, after, start)
        for s, tasks in enumerate(lists):
            wanted = [t for t in (before[s] if s < old else ()) if t.microbatch < start]
            wanted += [t for t in (after[s] if s < new else ()) if t.microbatch >= start]
            assert sorted(map(str, tasks)) == sorted(map(str, wanted))
            for kind in (Kind.F, Kind.B, Kind.U):
                order = [t.microbatch for t in tasks if t.kind == kind]
                assert order == sorted(order)
            places = {task: i for i, task in enumerate(tasks)}
            assert all(
                places[Task(s, Kind.F, t.microbatch)] < i
                for t, i in places.items()
                if t.kind == "B"
            )


def test_equal_plans_keep_their_lists() -> None:
    lists = find_schedule("1f1b").lists(3, 6)
    assert all(spliced(lists, lists, start) == lists for start in range(7))


def test_a_stage_that_comes_fills_and_one_that_goes_empties() -> None:
    one_f_one_b = find_schedule("1f1b")
    more = spliced(one_f_one_b.lists(1, 4), one_f_one_b.lists(2, 4), 2)
    assert [text(tasks) for tasks in more] == ["0F0 0B0 0F1 0F2 0B1 0F3 0B2 0B3", "1F2 1B2 1F3 1B3"]
    fewer = spliced(one_f_one_b.lists(2, 4), one_f_one_b.lists(1, 4), 2)
    assert [text(tasks) for tasks in fewer] == [
        "0F0 0F1 0B0 0B1 0F2 0B2 0F3 0B3",
        "1F0 1B0 1F1 1B1",
    ]
