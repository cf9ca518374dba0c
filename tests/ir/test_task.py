"""Tasks as text and as CSV."""

import re
from pathlib import Path
from typing import Any

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task, write_csv
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import one_f_one_b


@pytest.mark.parametrize("text", ["0F0", "12B345", "3SEND1"])
def test_text_form_round_trips(text: str) -> None:
    assert str(Task.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0F", "0f0", "0F0 1F0", "-1F0", "\u0661F0", "0F1_0"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"'{text}' is not a task: write stage, kind and micro-batch, such as 2F0"
    ):
        Task.parse(text)


def test_csv_is_that_of_torch(tmp_path: Path) -> None:
    write_csv(tmp_path / "schedule.csv", one_f_one_b(2, 2))
    assert (tmp_path / "schedule.csv").read_text().splitlines() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1B0,1F1,1B1",
    ]


def cells(path: Path) -> list[list[tuple[int, str, int]]]:
    """A file as torch's `_load_csv` reads it: a line per rank, in each cell a stage, a letter and a
    micro-batch.
    """
    word = re.compile(r"([0-9]+)([FIBW])([0-9]+)")
    found = [
        [word.fullmatch(cell) for cell in line.split(",")] for line in path.read_text().splitlines()
    ]
    return [
        [(int(cell[1]), cell[2], int(cell[3])) for cell in row if cell] for row in found if all(row)
    ]


def test_the_tasks_of_a_plan_are_written_as_they_are(tmp_path: Path) -> None:
    tasks = ("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1B1")
    write_csv(tmp_path / "order.csv", Plan.from_cuts([2, 1], tasks=tasks, schedule="auto").tasks)
    first = [(0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "W", 0), (0, "B", 1)]
    assert cells(tmp_path / "order.csv") == [
        first,
        [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1)],
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"])
def test_lists_of_rules_are_written_per_device(tmp_path: Path, name: str) -> None:
    lists = find_schedule(name).tasks(3, 6)
    write_csv(tmp_path / "rule.csv", lists)
    written = cells(tmp_path / "rule.csv")
    assert written == [
        [(task.stage, task.kind.value, task.microbatch) for task in row] for row in lists
    ]
    assert len(written) == 3


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        ((), r"\(\) has no task lists: give plan.tasks or"),
        ("0F0 0B0", "'0F0 0B0' has no task lists"),
        (("0F0 0X0",), "'0X0' is not a task: write stage, kind and micro-batch, such as 2F0"),
        (("0F0 0B0 0U0",), "0U0 cannot be written: torch reads only F, B, I, W"),
        (((Task(1, Kind.SEND, 0),),), "1SEND0 cannot be written"),
        (((Task(1, Kind.F, -1),),), "'1F-1' is not a task"),
    ],
)
def test_what_torch_has_no_word_for_is_refused(tmp_path: Path, lists: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        write_csv(tmp_path / "order.csv", lists)
    assert not (tmp_path / "order.csv").exists()


def test_a_row_says_where_and_what_it_is() -> None:
    assert str(Row(Kind.B, 1, 2, 7, 3, (), ())) == "2B3[layer 7]"
    assert str(Row(Kind.LOSS, 0, 1, -1, -1, (), ())) == "1LOSS"
