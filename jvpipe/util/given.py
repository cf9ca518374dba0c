"""Flags and whole numbers as a user gives them: Python's or NumPy's, one or several."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jvpipe.util.brief import brief

_LONGEST = 255
"""Bytes of a name in a folder."""


def checked_flag(name: str, value: Any) -> bool:
    """Returns an option that is on or off; raises ValueError for what is neither."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {brief(value)}")
    return value


def checked_frozen(name: str, frozen: Any) -> tuple[str, ...]:
    """Patterns of parameters that nothing updates.

    >>> checked_frozen("frozen", ["base/*"])
    ('base/*',)
    """
    given = [] if frozen is None else several(frozen)
    if isinstance(frozen, str) or given is None or not all(isinstance(x, str) and x for x in given):
        raise ValueError(
            f"{name} must be patterns of the paths of parameters, such as ['base/*'], not {brief(frozen)}"
        )
    return tuple(given)


def check_callback(on_step: Any) -> None:
    """Raises ValueError for what cannot be called after a step."""
    if on_step is not None and (not callable(on_step) or isinstance(on_step, type)):
        raise ValueError(f"on_step must be a function of (state, metrics), not {brief(on_step)}")


def checked_path(path: Any, name: str = "path") -> Path:
    """Checks a path, which may be a text or a path; `name` is how the user calls it.

    >>> checked_path(3)
    Traceback (most recent call last):
    ValueError: path must be a text or a pathlib.Path, not 3
    """
    if (
        not isinstance(path, str | os.PathLike)
        or not isinstance(text := os.fspath(path), str)
        or "\0" in text
    ):
        raise ValueError(f"{name} must be a text or a pathlib.Path, not {brief(path)}")
    if any(len(part.encode(errors="replace")) > _LONGEST for part in Path(path).parts):
        raise ValueError(f"{name} has a name of more than {_LONGEST} bytes: {brief(text)}")
    return Path(path)


def is_whole(value: Any) -> bool:
    """Tells whether a value is a whole number; True and False are not, though Python counts with them.

    >>> is_whole(2), is_whole(np.int64(2)), is_whole(True), is_whole(2.0)
    (True, True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def several(values: Any) -> list[Any] | None:
    """What a user gives where several of something are wanted, as a list; None for a single thing.

    >>> several((2, 1)), several(np.array([2, 1])), several(np.array(2)), several(2)
    ([2, 1], [np.int64(2), np.int64(1)], None, None)
    """
    return list(values) if is_stream(values) else None


def is_stream(values: Any) -> bool:
    """Tells whether values can be asked for one after another; an array without axes claims so, and fails."""
    return isinstance(values, Iterable) and getattr(values, "shape", None) != ()


def whole_numbers(what: str, values: Any) -> tuple[int, ...]:
    """Several whole numbers.

    Args:
        what: they are, for the message.
        values: as the user gave them.

    Raises:
        ValueError: one is none.

    >>> whole_numbers("devices", [0, np.int64(1)])
    (0, 1)
    >>> whole_numbers("devices", [0, 0.5])
    Traceback (most recent call last):
    ValueError: devices must be whole numbers, such as (0, 1), not [0, 0.5]
    """
    numbers = None if isinstance(values, str | bytes) else several(values)
    if numbers is None or not all(map(is_whole, numbers)):
        raise ValueError(f"{what} must be whole numbers, such as (0, 1), not {brief(values)}")
    return tuple(map(int, numbers))
