import importlib
import sys
from pathlib import Path

import pytest
from beartype.roar import BeartypeCallHintViolation

from jvpipe.ir.layers import Ref
from tests.checked import ONE_OF, check

MODULE = """
from dataclasses import dataclass
from typing import NamedTuple

def double(x: int) -> int:
    def inner(y: int) -> int:
        return 2 * y
    return inner(x)

def twice(x: str) -> str:
    def inner(y: int) -> str:
        return y + y
    return inner(x)

@dataclass
class Point:
    x: int

    def moved(self, by: int) -> int:
        return self.x + by

class Pair(NamedTuple):
    x: int

    def moved(self, by: int) -> int:
        return self.x + by
"""


def test_functions_and_classes_are_checked_but_not_what_is_inside_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample_to_check.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    check("sample_to_check", ())
    sample = importlib.import_module("sample_to_check")
    assert (sample.double(2), sample.twice("a"), sample.Point(1).moved(2)) == (4, "aa", 3)
    assert sample.Pair("a").x == "a", "one that is made by the million"
    for call in (
        lambda: sample.double("a"),
        lambda: sample.Point("a"),
        lambda: sample.Point(1).moved("a"),
        lambda: sample.Pair(1).moved("a"),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            call()


def test_the_package_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):  # one of so many calls is
        _ = [Ref("parameter", "0") for _ in range(ONE_OF)]  # pyright: ignore[reportArgumentType]
