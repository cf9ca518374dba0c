"""The small programs between replicas: parts of values, parts joined, and sums of gradients added up."""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from jvpipe.ir.examples import Over
from jvpipe.ir.rows import SliceRun
from jvpipe.programs.loss import Parts
from jvpipe.programs.store import Program


def cut_program(whole: jax.ShapeDtypeStruct, run: SliceRun) -> Program:
    """Returns what takes a part of an array.

    Args:
        whole: its shape and type.
        run: which part.
    """

    def cut(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.slice_in_dim(x, run.start, run.stop, axis=run.axis)]

    key = "slice", whole.shape, str(whole.dtype), run
    return Program(key, cut, (whole,))


def join_program(parts: Sequence[jax.ShapeDtypeStruct], axis: int) -> Program:
    """Returns what puts arrays one after another along an axis."""
    key = "concat", tuple((part.shape, str(part.dtype)) for part in parts), axis
    return Program(key, lambda *xs: [jnp.concatenate(xs, axis)], tuple(parts))


def reduce_program(
    sums: Sequence[jax.ShapeDtypeStruct], replicas: int, *, in_place: bool = False
) -> Program:
    """Returns what adds up sums of gradients of replicas, in their order; those of a parameter come in a row.

    Args:
        sums: shapes and types of those of a replica.
        replicas: how many.
        in_place: overwrites those of the first.
    """
    # The sums of all replicas, parameter after parameter: the first of a row is what the total may overwrite.
    inputs = tuple(array for array in sums for _ in range(replicas))

    def reduce(*parts: jax.Array) -> list[jax.Array]:
        totals = []
        for first in range(0, len(parts), replicas):
            total = parts[first]
            for part in parts[first + 1 : first + replicas]:
                total = total + part
            totals.append(total)
        return totals

    key = "reduce", tuple((s.shape, str(s.dtype)) for s in sums), replicas, in_place
    of_first = tuple(range(0, len(inputs), replicas))
    return Program(key, reduce, inputs, of_first if in_place else ())


def weighted_program(part: jax.ShapeDtypeStruct, weights: Sequence[float]) -> Program:
    """Returns what adds up parts of one shape, each times its weight, in their order."""

    def weigh(*parts: jax.Array) -> list[jax.Array]:
        weighted = [x * jnp.asarray(w, x.dtype) for x, w in zip(parts, weights, strict=True)]
        total = weighted[0]
        for more in weighted[1:]:
            total = total + more
        return [total]

    key = "weighted", part.shape, str(part.dtype), tuple(weights)
    return Program(key, weigh, (part,) * len(weights))


def state_program(leaves: Sequence[jax.ShapeDtypeStruct], parts: Sequence[Parts]) -> Program:
    """Returns what makes leaves of the model state of what replicas have made of their slices.

    Args:
        leaves: of each leaf a part of each slice; what it was before the micro-batch stands first, if that is added to.
        parts: how each is made of these.
    """

    def join(*values: jax.Array) -> list[jax.Array]:
        left, wholes = iter(values), list[jax.Array]()
        for leaf in parts:
            adds = leaf.spread.over is Over.ADDED
            before = next(left) if adds else None
            of_slices = list(islice(left, len(leaf.slices)))
            wholes.append(leaf.whole(of_slices) if before is None else _added(before, of_slices))
        return wholes

    key = "state", tuple((x.shape, str(x.dtype)) for x in leaves), tuple(parts)
    return Program(key, join, tuple(leaves))


def _added(before: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """Returns what a leaf was, and what each slice has added to it."""
    whole = before
    for part in parts:
        whole = whole + (part - before)
    return whole
