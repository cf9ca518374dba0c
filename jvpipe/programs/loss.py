"""The small programs around the layers: the sum of the losses, and fresh accumulators."""

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
from jvpipe.programs.store import Program


@dataclass(frozen=True, slots=True)
class Parts:
    """The slices on which replicas made a loss or a leaf of aux, and how the whole is made of what they made."""

    slices: tuple[Examples, ...]
    spread: Spread

    def whole(self, values: Sequence[jax.Array]) -> jax.Array:
        """Joins what replicas made on the slices of a micro-batch."""
        match self.spread.over:
            case Over.NONE | Over.FIRST:
                return values[0]
            case Over.SUM:
                return _total(values)
            case Over.MEAN:
                # Slices differ in size if the replicas do not divide the micro-batch: each counts by its examples.
                examples = sum(s.size for s in self.slices)
                shares = [np.asarray(s.size / examples, values[0].dtype) for s in self.slices]
                return _total([value * share for share, value in zip(shares, values, strict=True)])
            case Over.ALONG:
                return jnp.concatenate(values, self.spread.axis)
            case Over.MAX:
                return _largest(values)
            case Over.LAST:
                return values[-1]
            case _:
                raise AssertionError(f"{self.spread} cannot be joined")


def loss_program(
    graph: LayerGraph, inputs: Sequence[Any], microbatches: int, parts: Sequence[Parts | None] = ()
) -> Program:
    """Returns what reduces the losses and aux of the micro-batches, in ascending order of these.

    The loss is the mean over micro-batches, or `sum(total) / sum(weight)`; the weight follows. Each leaf of aux is
    reduced as the user says; unless they do, as the loss is if it is `Weighted` or a floating-point scalar. Others are
    stacked along a new first axis.

    Args:
        graph: of the model.
        inputs: the shapes of all losses, then of all aux, each of all micro-batches.
        microbatches: how many.
        parts: for each loss and leaf of aux the parts in which replicas make it, None if it is made whole; empty
            without replicas.
    """

    def reduce(*values: jax.Array) -> list[jax.Array]:
        columns = _columns(values, microbatches, parts)
        losses, aux = columns[: 1 + graph.weighted], columns[1 + graph.weighted :]
        loss = _total(losses[0])
        # The weight has its own sum, and only the quotient of both is the loss, however the items were spread.
        if graph.weighted:
            weight = _total(losses[1])
            out = [loss / weight.astype(loss.dtype), weight.astype(jnp.float32)]
        else:
            out = [loss / np.asarray(microbatches, loss.dtype)]
        for group, members in enumerate(graph.aux_groups):
            leaves = [aux[i] for i in members]
            if len(leaves) == 2:  # a `Weighted`: its total, and its weight
                total, weight = map(_total, leaves)
                out.append(total / weight.astype(total.dtype))
            else:
                out.append(_reduced(leaves[0], graph.aux_reduction(group)))
        return out

    shapes = tuple(inputs)
    types = tuple((s.shape, str(s.dtype)) for s in shapes)
    reductions = graph.weighted, graph.aux_groups, graph.aux_chosen
    return Program(("loss", *reductions, types, microbatches, tuple(parts)), reduce, shapes)


def _reduced(values: Sequence[jax.Array], how: AuxReduction | None) -> jax.Array:
    """Reduces what a leaf of aux was in each micro-batch, as the user says; None: stacks it."""
    match how:
        case None:
            return jnp.stack(values)
        case AuxReduction.MEAN:
            return _total(values) / np.asarray(len(values), values[0].dtype)
        case AuxReduction.SUM:
            return _total(values)
        case AuxReduction.MAX:
            return _largest(values)
        case AuxReduction.LAST:
            return values[-1]
        case _:
            assert_never(how)


def _largest(values: Sequence[jax.Array]) -> jax.Array:
    result = values[0]
    for value in values[1:]:
        result = jnp.maximum(result, value)
    return result


# In a loop, not by `jnp.sum`: the order of summation is that of the micro-batches, whatever the compiler does.
def _total(values: Sequence[jax.Array]) -> jax.Array:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _columns(
    values: Sequence[jax.Array], microbatches: int, parts: Sequence[Parts | None]
) -> list[Sequence[jax.Array]]:
    """Returns what each loss and leaf of aux was in each micro-batch."""
    if not parts:
        return [values[i : i + microbatches] for i in range(0, len(values), microbatches)]
    left, columns = iter(values), list[Sequence[jax.Array]]()
    for part in parts:
        if part is None:
            columns.append(list(islice(left, microbatches)))
        else:
            slices = [list(islice(left, len(part.slices))) for _ in range(microbatches)]
            columns.append([part.whole(of_one) for of_one in slices])
    return columns


def zeros_program(shapes: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Returns what makes fresh accumulators."""
    key = ("zeros", tuple((s.shape, str(s.dtype)) for s in shapes))
    return Program(key, lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes], ())
