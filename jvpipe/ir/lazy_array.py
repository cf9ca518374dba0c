"""Lazy arrays: parameters in a file, or examples of a batch, that are read only when needed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jvpipe.util.brief import brief


class LazyArray(jax.ShapeDtypeStruct):
    """An array of known shape and type whose contents are not read yet, such as a tensor in a file.

    Parameters may be lazy arrays: `Pipeline.init` reads them one after another, each in the
    process that owns it, and keeps no copy. The leaves of a batch may be lazy arrays, too:
    each process reads only the examples that its own stages and replicas work on.

    Args:
        shape: the shape of the whole array.
        dtype: the type of its numbers.
        read: a function that reads the array, or only the part that its arguments select. The
            arguments are indices of the first axes; the last one may be a slice.
        at: the indices of the part that this array stands for, as arguments of `read`; none for the
            whole array.

    >>> rows = LazyArray((2, 3), np.float32, lambda *at: np.ones((2, 3), np.float32)[at])
    >>> rows[1]
    LazyArray(shape=(3,), dtype=float32)
    >>> np.asarray(rows[1]).tolist()
    [1.0, 1.0, 1.0]
    >>> rows[1:][:1]
    LazyArray(shape=(1, 3), dtype=float32)
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, read: Callable[..., np.ndarray], *at: int | slice
    ) -> None:
        super().__init__(tuple(shape), dtype)
        self._read, self._at = read, at

    def __getitem__(self, i: Any) -> "LazyArray":
        """Returns the part at an index or a slice of the first axis, without reading it.

        Raises:
            IndexError: the index is out of bounds.
            ValueError: the index is neither a whole number nor a slice with step 1.
        """
        is_taken = i.step in (None, 1) if isinstance(i, slice) else isinstance(i, int | np.integer)
        if not is_taken:
            raise ValueError(
                "the index of a jvpipe.LazyArray must be a whole number or a slice with step 1, "
                f"not {brief(i)}: for any other part, index its array, np.asarray(lazy)"
            )
        before, begin = self._at, 0
        # A slice comes last. An index of this array counts from where the slice starts.
        if before and isinstance(before[-1], slice):
            before, begin = before[:-1], before[-1].start
        # Whatever is selected, only indices are kept, so a chain of selections reads once.
        if isinstance(i, slice):
            start, stop, _ = i.indices(self.shape[0])
            shape = (max(0, stop - start), *self.shape[1:])
            part = slice(begin + start, begin + max(start, stop))
            return LazyArray(shape, self.dtype, self._read, *before, part)
        if not 0 <= i < self.shape[0]:
            raise IndexError(f"index {i} is out of bounds for an axis of size {self.shape[0]}")
        return LazyArray(self.shape[1:], self.dtype, self._read, *before, begin + int(i))

    def astype(self, dtype: Any) -> "LazyArray":
        """Returns the array with another type, without reading it."""
        if np.dtype(dtype) == self.dtype:
            return self

        def read(*at: int | slice) -> np.ndarray:
            array = np.asarray(self._read(*at))
            return array.astype(dtype)

        return LazyArray(self.shape, dtype, read, *self._at)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the array.

        Raises:
            ValueError: the array that was read has another shape or type.
        """
        array = np.asarray(self._read(*self._at))
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(
                f"the function `read` returned {array.dtype}{list(array.shape)}, but it must "
                f"return {self.dtype}{list(self.shape)}"
            )
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={np.dtype(self.dtype)})"
