"""The small programs around the layers: they reduce losses and aux, and make fresh accumulators.

Aux are the values that a loss function returns besides the loss (`has_aux`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.ir.examples import Examples, Over, Spread
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.reductions import AuxReduction
from jvpipe.programs.store import Program, added_up, added_weights, types_of, weighted_sum


@dataclass(frozen=True, slots=True)
class Parts:
    """The slices on which replicas computed a value, such as a loss, and how to join the parts."""

    slices: tuple[Examples, ...]
    spread: Spread

    def whole(self, values: Sequence[jax.Array]) -> jax.Array:
        """Joins the parts that replicas computed on a micro-batch's slices, in slice order."""
        match self.spread.over:
            case Over.NONE | Over.FIRST:
                return values[0]
            case Over.SUM:
                return added_up(values)
            case Over.MEAN:
                # Slices may differ in size, so each value is weighted by its number of examples.
                sizes = [s.size for s in self.slices]
                return weighted_sum(values, [size / sum(sizes) for size in sizes])
            case Over.ALONG:
                return jnp.concatenate(values, self.spread.axis)
            case Over.MAX:
                return functools.reduce(jnp.maximum, values)
            case Over.LAST:
                return values[-1]
            case _:
                raise AssertionError(f"{self.spread} cannot be joined")


def loss_program(
    graph: LayerGraph,
    inputs: Sequence[Any],
    microbatches: int,
    parts: Sequence[Parts | None] = (),
) -> Program:
    """Returns the program that reduces losses and aux over micro-batches, in their order.

    The loss is the mean over the micro-batches. If losses are `Weighted`, the loss is
    `sum(total) / sum(weight)`, and the sum of the weights is the next result. A leaf of aux is
    reduced as the user chose (`aux_reduce`). Without a choice, a leaf that is `Weighted` or a
    floating-point scalar is reduced like the loss, and any other leaf is stacked along a new first
    axis.

    Args:
        graph: the layer graph of the model.
        inputs: the shapes of all losses, then of all aux, each for all micro-batches.
        microbatches: the number of micro-batches.
        parts: for each loss and leaf of aux, the parts in which replicas make it, or None if it is
            made whole; empty without replicas.
    """

    def reduce(*values: jax.Array) -> list[jax.Array]:
        columns = _columns(values, microbatches, parts)
        n_losses = 1 + graph.weighted
        losses = columns[:n_losses]
        aux = columns[n_losses:]
        loss = added_up(losses[0])
        # Totals and weights are summed separately, and the loss is the quotient of the two sums. So
        # the loss does not depend on which micro-batch has which examples.
        if graph.weighted:
            weight = added_weights(losses[1])
            out = [loss / weight.astype(loss.dtype), weight.astype(graph.weight_type)]
        else:
            out = [loss / np.asarray(microbatches, loss.dtype)]
        for group, members in enumerate(graph.aux_groups):
            leaves = [aux[i] for i in members]
            if len(leaves) == 2:  # a `Weighted`: its total, and its weight
                total, weight = added_up(leaves[0]), added_weights(leaves[1])
                out.append(total / weight.astype(total.dtype))
            else:
                out.append(_reduced(leaves[0], graph.aux_reduction(group)))
        return out

    reductions = graph.weighted, graph.aux_groups, graph.aux_chosen
    key = "loss", *reductions, types_of(inputs), microbatches, tuple(parts)
    return Program(key, reduce, tuple(inputs))


def _reduced(values: Sequence[jax.Array], how: AuxReduction | None) -> jax.Array:
    """Reduces the values of a leaf of aux over the micro-batches; None stacks them."""
    match how:
        case None:
            return jnp.stack(values)
        case AuxReduction.MEAN:
            return added_up(values) / np.asarray(len(values), values[0].dtype)
        case AuxReduction.SUM:
            return added_up(values)
        case AuxReduction.MAX:
            return functools.reduce(jnp.maximum, values)
        case AuxReduction.LAST:
            return values[-1]
        case _:
            assert_never(how)


def _columns(
    values: Sequence[jax.Array],
    microbatches: int,
    parts: Sequence[Parts | None],
) -> list[Sequence[jax.Array]]:
    """Returns, for each loss and leaf of aux, its values in the micro-batches."""
    if not parts:
        starts = range(0, len(values), microbatches)
        return [values[i : i + microbatches] for i in starts]
    # The values are ordered by column, then by micro-batch, then by slice.
    left = iter(values)
    columns = list[Sequence[jax.Array]]()
    for part in parts:
        if part is None:
            columns.append(list(islice(left, microbatches)))
            continue
        column = []
        for _ in range(microbatches):
            of_slices = list(islice(left, len(part.slices)))
            column.append(part.whole(of_slices))
        columns.append(column)
    return columns


def zeros_program(shapes: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Returns the program that makes fresh accumulators."""
    return Program(
        ("zeros", types_of(shapes)),
        lambda: list(map(jnp.zeros_like, shapes)),
        (),
    )
