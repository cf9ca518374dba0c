"""What a user gave, on one line of a message."""

import reprlib
from typing import Any

_MOST_LETTERS = 200


class _Brief(reprlib.Repr):
    """Python's short form, in which an array is its type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 16
        self.maxstring = self.maxother = 80

    def repr1(self, x: Any, level: int) -> str:
        """The short form of a value inside others; `level` says how much deeper it may go."""
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if dtype is not None and isinstance(shape, tuple) and shape:
            return f"{dtype}[{', '.join(map(str, shape))}]"
        return super().repr1(x, level)


def brief(value: Any) -> str:
    """A value as a message tells it: on one line, arrays by type and shape, of what is long the beginning.

    >>> import numpy as np
    >>> brief([np.zeros((40, 40)), 2.5]), brief({"*/attention/*": 3}), brief(np.float32(2))
    ('[float64[40, 40], 2.5]', "{'*/attention/*': 3}", 'np.float32(2.0)')
    >>> brief("x" * 1000) == brief("x" * 1001), len(brief([["x" * 80] * 16] * 16))
    (True, 200)
    """
    text = " ".join(_Brief().repr(value).splitlines())
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
