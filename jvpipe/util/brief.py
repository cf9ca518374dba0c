"""Writes any value or error in one line, so that an error message can show what was wrong."""

import reprlib
from typing import Any

_MOST_LETTERS = 200


class _Brief(reprlib.Repr):
    """Shortens long values as `reprlib` does, and writes each array as its type and shape."""

    def __init__(self) -> None:
        super().__init__()
        # The first line limits the number of elements of a container. The second limits the
        # number of characters of any other value.
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 16
        self.maxstring = self.maxother = 80

    def repr1(self, x: Any, level: int) -> str:
        """Writes the short form of a value, and shows at most `level` levels of nesting in it."""
        shape = getattr(x, "shape", None)
        dtype = getattr(x, "dtype", None)
        is_array = dtype is not None and isinstance(shape, tuple)
        # An array without axes is written as a number.
        if not is_array or not shape:
            return super().repr1(x, level)
        axes = ", ".join(map(str, shape))
        return f"{dtype}[{axes}]"


def brief(value: Any) -> str:
    """Writes a value for a message: on one line, arrays by type and shape, long values cut short.

    >>> import numpy as np
    >>> brief([np.zeros((40, 40)), 2.5]), brief({"*/attention/*": 3}), brief(np.float32(2))
    ('[float64[40, 40], 2.5]', "{'*/attention/*': 3}", 'np.float32(2.0)')
    >>> brief("x" * 1000) == brief("x" * 1001), len(brief([["x" * 80] * 16] * 16))
    (True, 200)
    """
    lines = _Brief().repr(value).splitlines()
    text = " ".join(lines)
    if len(text) <= _MOST_LETTERS:
        return text
    return f"{text[: _MOST_LETTERS - 3]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
