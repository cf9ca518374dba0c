"""Every kind of task, row and value is in its table; whoever tells kinds apart refuses one that it does not know."""

import enum
from typing import Any

import pytest

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.order import Waits
from tests.lowering.toy import GRAPH, layout


def test_the_tables_know_every_kind() -> None:
    assert KINDS.keys() == set(Kind)
    assert VALUES.keys() == set(ValueKind)


def test_every_value_that_lasts_has_an_owner_of_its_own() -> None:
    owners = [info.owner for info in VALUES.values() if info.lasts]
    assert len(owners) == len(set(owners)) == 4


def test_values_shift_what_they_have() -> None:
    assert Value(ValueKind.CONSTANT, 3).shifted(4, 4) == Value(ValueKind.CONSTANT, 3)
    assert Value(ValueKind.RESIDUAL, 0, 1, 6).shifted(-4, -1) == Value(ValueKind.RESIDUAL, 0, 1, 2)
    assert Value(ValueKind.PARAMETER, 0, version=6).shifted(-4, -1).version == 5


class Unknown(enum.StrEnum):
    """Kinds as they would be if one were added and nothing else."""

    W = "W"


@pytest.fixture
def unknown() -> Any:
    return Unknown.W


def test_an_unknown_kind_of_task_is_refused_by_the_order(unknown: Any) -> None:
    waits = Waits(GRAPH, [layout([3]).plan])
    with pytest.raises((AssertionError, KeyError)):
        list(waits(tuple.__new__(Task, (0, unknown, 0))))


def test_an_unknown_kind_of_row_has_no_text_but_its_own(unknown: Any) -> None:
    with pytest.raises(KeyError):
        KINDS[unknown]
    row = object.__new__(Row)
    for name, value in {"kind": unknown, "stage": 0, "layer": -1, "microbatch": 1}.items():
        object.__setattr__(row, name, value)
    assert str(row) == "0W1"
