"""The small programs around an asynchronous update: weights predicted, corrected, and what each update leaves behind.

w: a parameter; u: its last applied update; delta: the running mean of its updates; tau: the updates between a stage's
forward and its update; gamma = D ** (1 / tau).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.programs.store import Program

Shapes = Sequence[jax.ShapeDtypeStruct]
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def shifted(shapes: Shapes, factor: int) -> Program:
    """`(w..., v...) -> w + factor v`: weights predicted from u, or corrected by delta."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        return [
            w + np.asarray(factor, w.dtype) * v for w, v in zip(values[:n], values[n:], strict=True)
        ]

    return Program(("shifted", factor, _key(shapes)), run, (*shapes, *shapes))


def difference(shapes: Shapes) -> Program:
    """`(w before..., w after..., u...) -> u`, in place."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        return [new - old for old, new in zip(values[:n], values[n : 2 * n], strict=True)]

    return Program(
        ("difference", _key(shapes)), run, (*shapes, *shapes, *shapes), tuple(range(2 * n, 3 * n))
    )


def settled(shapes: Shapes, tau: int, decay: float, anneal_updates: int) -> Program:
    """PipeMare's T1 and T2: `(w before..., w after..., delta..., t) -> (w after..., delta..., t + 1)`, in place.

    The update is scaled by max(1, tau) ** -(1 - min(t / K, 1)).

    Args:
        shapes: of the parameters.
        tau: updates between a forward and its update.
        decay: D, between 0 and 1.
        anneal_updates: K; 0: updates are not scaled.
    """
    n, gamma = len(shapes), decay ** (1 / tau)

    def run(*values: jax.Array) -> list[Any]:
        old, new, delta, t = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[-1]
        left = 1 - jnp.minimum(
            t.astype(jnp.float32) / np.float32(max(anneal_updates, 1)), np.float32(1)
        )
        scale = np.float32(tau) ** -left if anneal_updates else jnp.float32(1)
        update = [(b - a) * scale.astype(a.dtype) for a, b in zip(old, new, strict=True)]
        mean = [
            np.asarray(gamma, d.dtype) * d + np.asarray(1 - gamma, d.dtype) * u
            for d, u in zip(delta, update, strict=True)
        ]
        after = [a + u for a, u in zip(old, update, strict=True)]
        return [*after, *mean, t + np.int32(1)]

    key = ("settled", tau, decay, anneal_updates, _key(shapes))
    return Program(key, run, (*shapes, *shapes, *shapes, COUNT), tuple(range(n, 3 * n + 1)))


def total(shape: jax.ShapeDtypeStruct, count: int) -> Program:
    """`(weight, ...) -> their sum`, a float32 scalar, in ascending order."""

    def run(*values: jax.Array) -> list[jax.Array]:
        sum_so_far = values[0]
        for value in values[1:]:
            sum_so_far = sum_so_far + value
        return [sum_so_far.astype(jnp.float32)]

    return Program(("total", count, _key([shape])), run, (shape,) * count)


def _key(shapes: Shapes) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(s.shape), str(s.dtype)) for s in shapes)
