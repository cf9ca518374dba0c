"""Halves that follow each other on the first stage are one backward; all others stay apart."""

from jvpipe.ir.task import Task, text
from jvpipe.schedules.halves import merged


def lists(*lines: str) -> tuple[tuple[Task, ...], ...]:
    return tuple(tuple(map(Task.parse, line.split())) for line in lines)


def test_a_second_half_right_behind_its_first_is_one_backward_where_nobody_waits() -> None:
    given = lists("0F0 0I0 0W0 0I1 0W1", "1I0 1W0 1I1 1W1", "0I0 3W0 0W0 0B1", "0I0 0W1 0I1 0W0")
    assert [text(tasks) for tasks in merged(given)] == ["0F0 0B0 0B1", *map(text, given[1:])]
    assert merged(merged(given)) == merged(given)
