"""Arrays that raise an error, instead of blocking forever, if another process is lost."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_KNOWN = {"shape", "dtype", "ndim", "size", "nbytes", "sharding", "is_ready", "is_deleted"}
"""The attributes that can be read without waiting for the array's values."""


class Awaited(NDArrayOperatorsMixin):
    """A device array whose values depend on other processes, such as a metric.

    Reading waits for the values. If a process is lost, reading a plain array would block forever;
    reading an `Awaited` raises an error that names the process. In all other respects, an `Awaited`
    works like a plain array, with NumPy and `jax.numpy` too. For `jax.jit`, convert it with
    `jnp.asarray`.

    Args:
        array: the array, whose values have yet to come.
        arrive: waits for the values; raises an error if their computation has failed.

    >>> loss = Awaited(jax.numpy.float32(0.5), jax.block_until_ready)
    >>> float(loss), f"{loss:.3f}", loss + 1, loss.shape, loss.item()
    (0.5, '0.500', np.float32(1.5), (), 0.5)
    """

    def __init__(self, array: jax.Array, arrive: Callable[[jax.Array], object]) -> None:
        self._array = array
        self._arrive = arrive

    def _come(self) -> jax.Array:
        """Waits for the values, and returns the array."""
        self._arrive(self._array)
        return self._array

    def block_until_ready(self) -> "Awaited":
        """Waits for the values."""
        self._come()
        return self

    def __getattr__(self, name: str) -> Any:
        # NumPy looks for protocols such as `__array_interface__`. Through the plain array's
        # protocols, NumPy would read the values without `_come`, and could block forever.
        if name.startswith("__"):
            raise AttributeError(name)
        array = self._array if name in _KNOWN else self._come()
        return getattr(array, name)

    def __jax_array__(self) -> jax.Array:
        return self._come()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._come(), dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        values = (np.asarray(x) if isinstance(x, Awaited) else x for x in inputs)
        return getattr(ufunc, method)(*values, **options)

    def __float__(self) -> float:
        return float(self._come())

    def __int__(self) -> int:
        return int(self._come())

    def __bool__(self) -> bool:
        return bool(self._come())

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self._come())

    def __getitem__(self, index: Any) -> jax.Array:
        return self._come()[index]

    def __format__(self, spec: str) -> str:
        return format(self._come(), spec)

    def __repr__(self) -> str:
        return repr(self._come())
