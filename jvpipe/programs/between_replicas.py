"""The small programs between replicas: they cut values, join parts, and add up gradients.

Replicas are the places that run the same stage, each on a slice of every micro-batch.
"""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from jvpipe.ir.examples import Over
from jvpipe.ir.rows import SliceRun
from jvpipe.programs.loss_programs import Parts
from jvpipe.programs.store import Program, added_up, types_of, weighted_sum


def cut_program(whole: jax.ShapeDtypeStruct, run: SliceRun) -> Program:
    """Returns the program that takes a part of an array.

    Args:
        whole: the shape and type of the array.
        run: the axis and the range of the part.
    """

    def cut(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.slice_in_dim(x, run.start, run.stop, axis=run.axis)]

    key = "slice", whole.shape, str(whole.dtype), run
    return Program(key, cut, (whole,))


def join_program(parts: Sequence[jax.ShapeDtypeStruct], axis: int) -> Program:
    """Returns the program that concatenates arrays along an axis."""
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
    """Returns the program that adds up the replicas' sums of gradients, in the replicas' order.

    Its inputs are ordered by parameter, and for each parameter by replica.

    Args:
        sums: the shapes and types of the sums that one replica has.
        replicas: the number of replicas.
        in_place: whether the results overwrite the sums of the first replica.
    """
    inputs = tuple(array for array in sums for _ in range(replicas))

    def reduce(*parts: jax.Array) -> list[jax.Array]:
        rows = range(0, len(parts), replicas)
        return [added_up(parts[first : first + replicas]) for first in rows]

    key = "reduce", types_of(sums), replicas, in_place
    # The first of each parameter's inputs belongs to the first replica.
    of_first = tuple(range(0, len(inputs), replicas))
    return Program(
        key,
        reduce,
        inputs,
        of_first if in_place else (),
    )


def weighted_program(part: jax.ShapeDtypeStruct, weights: Sequence[float]) -> Program:
    """Returns the program that sums arrays of one shape in their order, each times its weight."""

    def weigh(*parts: jax.Array) -> list[jax.Array]:
        return [weighted_sum(parts, weights)]

    key = "weighted", part.shape, str(part.dtype), tuple(weights)
    return Program(key, weigh, (part,) * len(weights))


def state_program(leaves: Sequence[jax.ShapeDtypeStruct], parts: Sequence[Parts]) -> Program:
    """Returns the program that joins the replicas' parts of a model state, such as running means.

    Args:
        leaves: for each leaf of the state, the shapes of its parts on all slices. If the slices
            add to the leaf, the shape of its value before the micro-batch comes first.
        parts: for each leaf, how its parts are joined.
    """

    def join(*values: jax.Array) -> list[jax.Array]:
        left = iter(values)
        wholes = list[jax.Array]()
        for leaf in parts:
            if leaf.spread.over is not Over.ADDED:
                of_slices = list(islice(left, len(leaf.slices)))
                wholes.append(leaf.whole(of_slices))
                continue
            # The result is the leaf before the micro-batch, plus each slice's change of the leaf.
            before = next(left)
            added = [part - before for part in islice(left, len(leaf.slices))]
            wholes.append(added_up([before, *added]))
        return wholes

    return Program(
        ("state", types_of(leaves), tuple(parts)),
        join,
        tuple(leaves),
    )
