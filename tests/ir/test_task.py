"""Tasks as text and as CSV."""

from pathlib import Path

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task, read_csv, write_csv
from jvpipe.schedules.gpipe import gpipe
from jvpipe.schedules.one_f_one_b import one_f_one_b


@pytest.mark.parametrize("text", ["0F0", "12B345", "3SEND1"])
def test_text_form_round_trips(text: str) -> None:
    assert str(Task.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0F", "0f0", "0F0 1F0", "-1F0"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a task: write stage, kind and micro-batch, such as 2F0"):
        Task.parse(text)


@pytest.mark.parametrize("lists", [gpipe(3, 2), one_f_one_b(4, 5), one_f_one_b(1, 1)])
def test_csv_round_trips(lists: tuple, tmp_path: Path) -> None:
    write_csv(tmp_path / "schedule.csv", lists)
    assert read_csv(tmp_path / "schedule.csv") == lists


def test_csv_is_that_of_torch(tmp_path: Path) -> None:
    write_csv(tmp_path / "schedule.csv", one_f_one_b(2, 2))
    assert (tmp_path / "schedule.csv").read_text().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    (tmp_path / "idle.csv").write_text("0F0,0F1,,0B0\n,1F0, ,1B0\n")
    assert read_csv(tmp_path / "idle.csv")[1] == (Task(1, Kind.F, 0), Task(1, Kind.B, 0))


def test_a_row_says_where_and_what_it_is() -> None:
    assert str(Row(Kind.B, 1, 2, 7, 3, (), ())) == "2B3[layer 7]"
    assert str(Row(Kind.LOSS, 0, 1, -1, -1, (), ())) == "1LOSS"
