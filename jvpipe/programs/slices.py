"""The small programs between replicas: parts of values, parts joined,
and sums of gradients added up.
"""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from jvpipe.ir.examples import Over
from jvpipe.ir.rows import SliceRun
from jvpipe.programs.loss import Parts
from jvpipe.programs.store import Program, added_up, types_of


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
    key = "concat", types_of(parts), axis
    return Program(
        key,
        lambda *xs: [jnp.concatenate(xs, axis)],
        tuple(parts),
    )


def reduce_program(
    sums: Sequence[jax.ShapeDtypeStruct],
    replicas: int,
    *,
    in_place: bool = False,
) -> Program:
    """Returns what adds up sums of gradients of replicas, in their order.

    All sums of a parameter come in a row.

    Args:
        sums: shapes and types of those of a replica.
        replicas: how many.
        in_place: overwrites those of the first.
    """
    # The sums of all replicas, parameter after parameter: the first of a row is what the total may
    # overwrite.
    inputs = tuple(array for array in sums for _ in range(replicas))

    def reduce(*parts: jax.Array) -> list[jax.Array]:
        rows = range(0, len(parts), replicas)
        return [added_up(parts[first : first + replicas]) for first in rows]

    key = "reduce", types_of(sums), replicas, in_place
    of_first = tuple(range(0, len(inputs), replicas))
    return Program(
        key,
        reduce,
        inputs,
        of_first if in_place else (),
    )


def weighted_program(part: jax.ShapeDtypeStruct, weights: Sequence[float]) -> Program:
    """Returns what adds up parts of one shape, each times its weight, in their order."""

    def weigh(*parts: jax.Array) -> list[jax.Array]:
        pairs = zip(parts, weights, strict=True)
        return [added_up([x * jnp.asarray(w, x.dtype) for x, w in pairs])]

    key = "weighted", part.shape, str(part.dtype), tuple(weights)
    return Program(key, weigh, (part,) * len(weights))


def state_program(leaves: Sequence[jax.ShapeDtypeStruct], parts: Sequence[Parts]) -> Program:
    """Returns what makes leaves of the model state of what replicas have made of their slices.

    Args:
        leaves: of each leaf a part of each slice; what it was before the micro-batch stands first,
            if that is added to.
        parts: how each is made of these.
    """

    def join(*values: jax.Array) -> list[jax.Array]:
        left = iter(values)
        wholes = list[jax.Array]()
        for leaf in parts:
            if leaf.spread.over is not Over.ADDED:
                of_slices = list(islice(left, len(leaf.slices)))
                wholes.append(leaf.whole(of_slices))
                continue
            # What the leaf was, and what each slice has added to it.
            before = next(left)
            added = [part - before for part in islice(left, len(leaf.slices))]
            wholes.append(added_up([before, *added]))
        return wholes

    return Program(
        ("state", types_of(leaves), tuple(parts)),
        join,
        tuple(leaves),
    )
