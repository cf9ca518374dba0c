"""The small programs around an asynchronous update: weights predicted, corrected, and what each update leaves behind.

w         a parameter
u         its last applied update
delta     the running mean of its updates
tau       the updates between a stage's forward and its update
gamma     D ** (1 / tau): how much of the mean each update keeps
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
    """Returns `(w..., v...) -> w + factor v`: weights predicted from u, or corrected by delta."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        pairs = zip(values[:n], values[n:], strict=True)
        return [w + np.asarray(factor, w.dtype) * v for w, v in pairs]

    return Program(("shifted", factor, _key(shapes)), run, (*shapes, *shapes))


def difference(shapes: Shapes) -> Program:
    """Returns `(w before..., w after..., u...) -> u`, in place."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        return [new - old for old, new in zip(values[:n], values[n : 2 * n], strict=True)]

    donated = tuple(range(2 * n, 3 * n))
    return Program(("difference", _key(shapes)), run, (*shapes, *shapes, *shapes), donated)


def settled(shapes: Shapes, tau: int, decay: float, anneal_updates: int) -> Program:
    """Returns PipeMare's T1 and T2 as a program that works in place.

    It is `(w before..., w after..., delta..., t) -> (w after..., delta..., t + 1)`. T1 scales the update, the t-th, by
    max(1, tau) ** -(1 - min(t / K, 1)); T2 is delta = gamma delta + (1 - gamma) u.

    Args:
        shapes: of the parameters.
        tau: updates between a forward and its update.
        decay: D, between 0 and 1.
        anneal_updates: K; 0: updates are not scaled.
    """
    n, gamma = len(shapes), decay ** (1 / tau)

    def scale(t: jax.Array) -> Any:
        if not anneal_updates:
            return jnp.float32(1)
        done = t.astype(jnp.float32) / np.float32(anneal_updates)
        left = 1 - jnp.minimum(done, np.float32(1))
        return np.float32(tau) ** -left

    def mean(delta: jax.Array, update: jax.Array) -> Any:
        return np.asarray(gamma, delta.dtype) * delta + np.asarray(1 - gamma, delta.dtype) * update

    # Factors have the type of what they multiply: a float32 one would make bfloat16 arrays wider.
    def run(*values: jax.Array) -> list[Any]:
        old, new, delta, t = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[-1]
        by = scale(t)
        updates = [(b - a) * by.astype(a.dtype) for a, b in zip(old, new, strict=True)]
        after = [a + u for a, u in zip(old, updates, strict=True)]
        return [*after, *map(mean, delta, updates), t + np.int32(1)]

    key = ("settled", tau, decay, anneal_updates, _key(shapes))
    return Program(key, run, (*shapes, *shapes, *shapes, COUNT), tuple(range(n, 3 * n + 1)))


def total(shape: jax.ShapeDtypeStruct, count: int) -> Program:
    """Returns `(weight, ...) -> their sum`, a float32 scalar, in ascending order."""

    def run(*values: jax.Array) -> list[jax.Array]:
        sum_so_far = values[0]
        for value in values[1:]:
            sum_so_far = sum_so_far + value
        return [sum_so_far.astype(jnp.float32)]

    return Program(("total", count, _key([shape])), run, (shape,) * count)


def _key(shapes: Shapes) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(s.shape), str(s.dtype)) for s in shapes)
