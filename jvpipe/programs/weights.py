"""The small programs around an asynchronous update: weights predicted, corrected,
and what each update leaves behind.

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

from jvpipe.programs.store import Program, added_up, types_of

Shapes = Sequence[jax.ShapeDtypeStruct]
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def shifted(shapes: Shapes, factor: int) -> Program:
    """Returns `(w..., v...) -> w + factor v`: weights predicted from u, or corrected by delta."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        pairs = zip(values[:n], values[n:], strict=True)
        return [w + np.asarray(factor, w.dtype) * v for w, v in pairs]

    key = "shifted", factor, types_of(shapes)
    return Program(key, run, (*shapes, *shapes))


def difference(shapes: Shapes) -> Program:
    """Returns `(w before..., w after..., u...) -> u`, in place."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        pairs = zip(values[:n], values[n : 2 * n], strict=True)
        return [after - before for before, after in pairs]

    # The last updates are overwritten; they are taken for nothing else.
    last_updates = tuple(range(2 * n, 3 * n))
    key = "difference", types_of(shapes)
    return Program(
        key,
        run,
        (*shapes, *shapes, *shapes),
        last_updates,
    )


def settled(
    shapes: Shapes,
    tau: int,
    decay: float,
    anneal_updates: int,
) -> Program:
    """Returns PipeMare's T1 and T2 as a program that works in place.

    It is `(w before..., w after..., delta..., t) -> (w after..., delta..., t + 1)`. T1 scales the
    update, the t-th, by max(1, tau) ** -(1 - min(t / K, 1)); T2 is delta = gamma delta + (1 -
    gamma) u.

    Args:
        shapes: of the parameters.
        tau: updates between a forward and its update.
        decay: D, between 0 and 1.
        anneal_updates: K; 0: updates are not scaled.
    """
    n = len(shapes)
    gamma = decay ** (1 / tau)

    def scale(t: jax.Array) -> Any:
        if not anneal_updates:
            return jnp.float32(1)
        done = t.astype(jnp.float32) / np.float32(anneal_updates)
        left = 1 - jnp.minimum(done, np.float32(1))
        return np.float32(tau) ** -left

    # Factors have the type of what they multiply: a float32 one would make bfloat16 arrays wider.
    def mean(delta: jax.Array, update: jax.Array) -> Any:
        kept = np.asarray(gamma, delta.dtype) * delta
        return kept + np.asarray(1 - gamma, delta.dtype) * update

    def run(*values: jax.Array) -> list[Any]:
        *arrays, t = values
        old = arrays[:n]
        new = arrays[n : 2 * n]
        delta = arrays[2 * n :]
        by = scale(t)
        updates = []
        for a, b in zip(old, new, strict=True):
            updates.append((b - a) * by.astype(a.dtype))
        after = [a + update for a, update in zip(old, updates, strict=True)]
        return [*after, *map(mean, delta, updates), t + np.int32(1)]

    key = "settled", tau, decay, anneal_updates, types_of(shapes)
    # All but the weights before the update, which others may still read.
    in_place = tuple(range(n, 3 * n + 1))
    inputs = (*shapes, *shapes, *shapes, COUNT)
    return Program(key, run, inputs, in_place)


def total(shape: jax.ShapeDtypeStruct, count: int) -> Program:
    """Returns `(weight, ...) -> their sum`, a float32 scalar, in ascending order."""

    def run(*values: jax.Array) -> list[jax.Array]:
        return [added_up(values).astype(jnp.float32)]

    key = "total", count, types_of([shape])
    return Program(key, run, (shape,) * count)
