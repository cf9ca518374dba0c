"""Checks values that a user passes: flags, patterns, paths, addresses, fields and whole numbers.

Numbers may be Python's or NumPy's.
"""

import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from jvpipe.util.brief import brief

_LONGEST_NAME = 255
"""The largest number of bytes that the usual file systems allow in a file's or folder's name."""


def checked_flag(name: str, value: Any) -> bool:
    """Returns the value of an option that is on or off; raises ValueError unless it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {brief(value)}")
    return value


def checked_frozen(name: str, frozen: Any) -> tuple[str, ...]:
    """Returns the patterns that name the frozen parameters, which training does not update.

    Args:
        name: the name of the option, for the message.
        frozen: the patterns as the user gave them; None if no parameter is frozen.

    Raises:
        ValueError: `frozen` is a single text, or not a sequence of texts.

    >>> checked_frozen("frozen", ["base/*"])
    ('base/*',)
    """
    given = () if frozen is None else frozen
    patterns = several(given)
    if patterns is None or not all(isinstance(x, str) and x for x in patterns):
        raise ValueError(
            f"{name} must be patterns of the paths of parameters, such as ['base/*'], "
            f"not {brief(frozen)}"
        )
    return tuple(patterns)


def check_callable(name: str, value: Any, arguments: str) -> None:
    """Raises ValueError unless a value is a function.

    Args:
        name: the name of the argument, for the message.
        value: the value as the user gave it.
        arguments: what the function will be called with, for the message.
    """
    # A class is callable, but calling it would only make an object that nothing uses.
    if not callable(value) or isinstance(value, type):
        raise ValueError(f"{name} must be a function of ({arguments}), not {brief(value)}")


def checked_path(name: str, path: Any) -> Path:
    """Returns the `pathlib.Path` for a text or a path; the file need not exist.

    Args:
        name: the name of the argument or option, for the message.
        path: the path as the user gave it.

    Raises:
        ValueError: `path` is empty, or neither a text nor a path, or no file system allows such a
            name.

    >>> checked_path("path", 3)
    Traceback (most recent call last):
    ValueError: path must be a text or a pathlib.Path, not 3
    """
    is_path = isinstance(path, str | os.PathLike)
    text = os.fspath(path) if is_path else None
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"{name} must be a text or a pathlib.Path, not {brief(path)}")
    # Often a variable of the shell that is not set. `Path("")` is the current folder.
    if not text:
        raise ValueError(f"{name} is the empty text '': give a path; the current folder is .")
    names = [part.encode(errors="replace") for part in Path(text).parts]
    longest = max(map(len, names), default=0)
    if longest > _LONGEST_NAME:
        raise ValueError(f"{name} has a name of more than {_LONGEST_NAME} bytes: {brief(text)}")
    return Path(text)


def shown_path(path: Path) -> str:
    r"""Writes a path for a message: as it is, or with escapes if it has line breaks.

    >>> shown_path(Path("a/b")), shown_path(Path("a\nb"))
    ('a/b', "'a\\nb'")
    """
    text = str(path)
    return text if text.isprintable() else repr(text)


def checked_address(name: str, address: str) -> tuple[str, int]:
    """Returns the host and the port in a text of the form HOST:PORT.

    Raises:
        ValueError: the text has another form. `name` is the option's name in the message.

    >>> checked_address("--coordinator", "host0:12345")
    ('host0', 12345)
    """
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 2**16
    if not host or not is_port:
        raise ValueError(f"{name} must be HOST:PORT, such as host0:12345, not {address}")
    return host, int(port)


def checked_fields(name: str, texts: Iterable[str]) -> dict[str, str]:
    """Returns the values in texts of the form NAME=VALUE, by the names of a model's fields.

    Raises:
        ValueError: a text has another form. `name` is the option's name in the message.

    >>> checked_fields("--set", ["blocks=12"])
    {'blocks': '12'}
    """
    fields = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{name} {text}: give a field of the model and its value, NAME=VALUE")
        fields[field.strip()] = value.strip()
    return fields


def is_whole(value: Any) -> bool:
    """Tells whether a value is a whole number; True and False are not.

    >>> is_whole(2), is_whole(np.int64(2)), is_whole(True), is_whole(2.0)
    (True, True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def several(values: Any) -> list[Any] | None:
    """Returns a list of the values if there are several; None if `values` is a single value.

    A text, bytes, a mapping or a set is a single value, although it can be iterated over. A set has
    no order, so its values cannot stand for stages.

    >>> several((2, 1)), several(np.array([2, 1])), several(np.array(2)), several({2: 1})
    ([2, 1], [np.int64(2), np.int64(1)], None, None)
    """
    is_single = isinstance(values, str | bytes | Mapping | Set)
    return list(values) if is_stream(values) and not is_single else None


def is_stream(values: Any) -> bool:
    """Tells whether a value can be iterated over.

    An array without axes cannot be iterated over: it has a method `__iter__`, which fails.
    """
    shape = getattr(values, "shape", None)
    return isinstance(values, Iterable) and shape != ()


def whole_numbers(what: str, values: Any) -> tuple[int, ...]:
    """Returns several whole numbers as a tuple of Python's `int`.

    Args:
        what: what the numbers stand for, such as "devices", for the message.
        values: the numbers as the user gave them.

    Raises:
        ValueError: `values` is not a sequence of whole numbers.

    >>> whole_numbers("devices", [0, np.int64(1)])
    (0, 1)
    >>> whole_numbers("devices", [0, 0.5])
    Traceback (most recent call last):
    ValueError: devices must be whole numbers, such as (0, 1), not [0, 0.5]
    """
    numbers = several(values)
    if numbers is None or not all(map(is_whole, numbers)):
        raise ValueError(f"{what} must be whole numbers, such as (0, 1), not {brief(values)}")
    return tuple(map(int, numbers))
