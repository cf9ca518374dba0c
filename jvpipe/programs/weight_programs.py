"""The small programs around an asynchronous update: they shift weights and record updates.

They predict weights for a forward (XPipe), correct weights for a backward (PipeMare), and record
the change that each update made. In the docstrings:

w         a parameter
u         the last applied update of w
delta     the running mean of the updates of w
tau       the number of a stage's updates between a forward and the update from its gradients
gamma     D ** (1 / tau), with the decay D: the factor of the old mean in the new one
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.programs.store import Program, added_weights, types_of

Shapes = Sequence[jax.ShapeDtypeStruct]
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def shifted(shapes: Shapes, factor: int) -> Program:
    """Returns `(w..., v...) -> w + factor v`, where v is u for XPipe and delta for PipeMare."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        results = []
        for w, v in zip(values[:n], values[n:], strict=True):
            by = np.asarray(factor, w.dtype)
            results.append(w + by * v)
        return results

    key = "shifted", factor, types_of(shapes)
    return Program(key, run, (*shapes, *shapes))


def difference(shapes: Shapes) -> Program:
    """Returns `(w before..., w after..., u...) -> w after - w before`, which overwrites u."""
    n = len(shapes)

    def run(*values: jax.Array) -> list[jax.Array]:
        before = values[:n]
        after = values[n : 2 * n]
        return [new - old for old, new in zip(before, after, strict=True)]

    # The program takes the last updates only to overwrite them.
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
    """Returns PipeMare's rules T1 and T2 as a program that overwrites all inputs but `w before`.

    The program is `(w before..., w after..., delta..., t) -> (w after..., delta..., t + 1)`. After
    t updates, T1 divides the next update u by tau ** p. The exponent p falls from 1 to 0 in the
    first K updates: p = max(0, 1 - t / K). T2 then sets delta to gamma delta + (1 - gamma) u.

    Args:
        shapes: the shapes of the parameters.
        tau: the number of updates between a forward and its update; at least 1.
        decay: D, between 0 and 1.
        anneal_updates: K; 0 turns T1 off.
    """
    n = len(shapes)
    gamma = decay ** (1 / tau)

    def scale(t: jax.Array) -> Any:
        if not anneal_updates:
            return jnp.float32(1)
        done = t.astype(jnp.float32) / np.float32(anneal_updates)
        left = 1 - jnp.minimum(done, np.float32(1))
        return np.float32(tau) ** -left

    # Each factor has the type of the array that it multiplies. A float32 factor would widen
    # bfloat16.
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
        means = map(mean, delta, updates)
        return [*after, *means, t + np.int32(1)]

    key = "settled", tau, decay, anneal_updates, types_of(shapes)
    # The weights before the update are not overwritten, because other programs may still read them.
    in_place = tuple(range(n, 3 * n + 1))
    inputs = (*shapes, *shapes, *shapes, COUNT)
    return Program(key, run, inputs, in_place)


def total(shape: jax.ShapeDtypeStruct, count: int, dtype: str = "float32") -> Program:
    """Returns the program that adds up the losses' weights in their order.

    Args:
        shape: the shape and type of a weight.
        count: the number of weights.
        dtype: the type of the sum, a scalar.
    """

    def run(*values: jax.Array) -> list[jax.Array]:
        return [added_weights(values).astype(dtype)]

    key = "total", count, types_of([shape]), dtype
    return Program(key, run, (shape,) * count)
