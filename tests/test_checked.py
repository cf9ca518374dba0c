import importlib
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from beartype.roar import BeartypeCallHintViolation

from jvpipe.ir.layers import Ref
from tests.checked import FIRST, IN_EACH_TEST, check, check_again

MODULE = """
from dataclasses import dataclass
from typing import NamedTuple

def double(x: int) -> int:
    def inner(y: int) -> int:
        return 2 * y
    return inner(x)

def shown(x: int, *, more: int = 1) -> int:
    return x + more

def twice(x: str) -> str:
    def inner(y: int) -> str:
        return y + y
    return inner(x)

@dataclass
class Point:
    x: int

    def moved(self, by: int) -> int:
        return self.x + by

@dataclass
class Named(Point):
    def moved(self, by: int) -> int:
        return super().moved(by) + 1

class Pair(NamedTuple):
    x: int

    def moved(self, by: int) -> int:
        return self.x + by
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "sample_to_check.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "sample_to_check", raising=False)
    check("sample_to_check", ())
    return importlib.import_module("sample_to_check")


def test_functions_and_classes_are_checked_but_not_what_is_inside_a_function(sample: Any) -> None:
    assert (sample.double(2), sample.twice("a"), sample.Point(1).moved(2)) == (4, "aa", 3)
    assert sample.Named(1).moved(2) == 4
    assert sample.Pair("a").x == "a", "one that is made by the million"
    for call in (
        lambda: sample.double("a"),
        lambda: sample.Point("a"),
        lambda: sample.Point(1).moved("a"),
        lambda: sample.Named(1).moved("a"),
        lambda: sample.Pair(1).moved("a"),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            call()


def test_a_function_is_checked_in_its_first_calls_and_again_in_the_first_of_each_test(
    sample: Any,
) -> None:
    for calls in (FIRST, IN_EACH_TEST):
        for _ in range(calls - 1):
            assert sample.shown(1) == 2
        with pytest.raises(BeartypeCallHintViolation):
            sample.shown(1.5)
        assert sample.shown(1.5, more=2) == 3.5, "nobody looks"
        assert list(signature(sample.shown).parameters) == ["x", "more"]
        check_again()


def test_the_package_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        Ref("parameter", "0")  # pyright: ignore[reportArgumentType]
