"""Arrays that are read where they are to lie: a file's, of which no host needs to hold all at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


class LazyArray(jax.ShapeDtypeStruct):
    """An array of which only shape and type are known until it is read, such as a tensor in a file.

    Parameters may be such arrays: `Pipeline.init` reads each by itself, in the process that owns it, and keeps no copy.

    Args:
        shape: of the whole.
        dtype: of its numbers.
        read: called without arguments it reads the whole; with some, the part at these indices of the first axes.

    >>> rows = LazyArray((2, 3), np.float32, lambda *at: np.ones((2, 3), np.float32)[at])
    >>> rows[1]
    LazyArray(shape=(3,), dtype=float32)
    >>> np.asarray(rows[1]).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, read: Callable[..., np.ndarray], *at: int
    ) -> None:
        super().__init__(tuple(shape), dtype)
        self._read, self._at = read, at

    def __getitem__(self, i: int) -> "LazyArray":
        """Returns the part at an index of the first axis, still to be read."""
        if not 0 <= i < self.shape[0]:
            raise IndexError(f"index {i} is out of bounds for {self.shape[0]}")
        return LazyArray(self.shape[1:], self.dtype, self._read, *self._at, i)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the numbers.

        Raises:
            ValueError: what was read is of another shape or type.
        """
        array = np.asarray(self._read(*self._at))
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(
                f"read gave {array.dtype}{list(array.shape)}, it should be {self.dtype}{list(self.shape)}"
            )
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={np.dtype(self.dtype)})"
