"""Grids of cases: `make test` tries one of each kind, `make thorough` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters of a test, of which only some are tried unless it is to be thorough.

    Args:
        cases: all of them.
        always: those that are tried each time; each is one of `cases`.
    """
    every = list(cases)
    assert all(case in every for case in always), f"{always} are not all among {every}"
    return [
        case if case in always else pytest.param(*_fields(case), marks=pytest.mark.thorough)
        for case in every
    ]


def _fields(case: Any) -> Collection[Any]:
    """The arguments of a case: those in a plain tuple; any other value, a named tuple too, is one."""
    return case if type(case) is tuple else (case,)
