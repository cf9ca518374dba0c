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
    """The slices that replicas made of a loss or a leaf of aux, and how the whole is made of them."""

    slices: tuple[Examples, ...]
    spread: Spread

    def whole(self, values: Sequence[jax.Array]) -> jax.Array:
        """Joins what the slices of a micro-batch gave."""
        examples = sum(s.size for s in self.slices)
        match self.spread.over:
            case Over.NONE | Over.FIRST:
                return values[0]
            case Over.SUM:
                return _total(values)
            case Over.MEAN:
                shares = (np.asarray(s.size / examples, values[0].dtype) for s in self.slices)
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
    """Reduces what the micro-batches gave, in ascending order.

    The loss is the mean over micro-batches, or `sum(total) / sum(weight)`; the weight follows. Each leaf of aux is
    reduced as the user says. Else it is reduced as the loss is if it is `Weighted` or a floating-point scalar; others
    are stacked along a new first axis.

    Args:
        graph: whose losses and aux.
        inputs: the shapes of all losses, then of all aux, each of all micro-batches.
        microbatches: how many.
        parts: of each loss and leaf of aux, if replicas have made it in parts, the parts that a micro-batch has.
    """

    def reduce(*values: jax.Array) -> list[jax.Array]:
        columns = _columns(values, microbatches, parts)
        losses, aux = columns[: 1 + graph.weighted], columns[1 + graph.weighted :]
        loss = _total(losses[0])
        if graph.weighted:
            weight = _total(losses[1])
            out = [loss / weight.astype(loss.dtype), weight.astype(jnp.float32)]
        else:
            out = [loss / np.asarray(microbatches, loss.dtype)]
        for group, members in enumerate(graph.aux_groups):
            leaves = [aux[i] for i in members]
            if len(leaves) == 2:
                sums = _total(leaves[0]), _total(leaves[1])
                out.append(sums[0] / sums[1].astype(sums[0].dtype))
            else:
                out.append(_reduced(leaves[0], graph.aux_reduction(group)))
        return out

    shapes = tuple(inputs)
    told = tuple((s.shape, str(s.dtype)) for s in shapes)
    key = (
        "loss",
        graph.weighted,
        graph.aux_groups,
        graph.aux_chosen,
        told,
        microbatches,
        tuple(parts),
    )
    return Program(key, reduce, shapes)


def _reduced(values: Sequence[jax.Array], how: AuxReduction | None) -> jax.Array:
    """What the micro-batches made of a leaf of aux, as one."""
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


def _total(values: Sequence[jax.Array]) -> jax.Array:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _columns(
    values: Sequence[jax.Array], microbatches: int, parts: Sequence[Parts | None]
) -> list[Sequence[jax.Array]]:
    """What each loss and leaf of aux was in each micro-batch."""
    if not parts:
        return [values[i : i + microbatches] for i in range(0, len(values), microbatches)]
    left, columns = iter(values), list[Sequence[jax.Array]]()
    for part in parts:
        given = [
            list(islice(left, 1 if part is None else len(part.slices))) for _ in range(microbatches)
        ]
        columns.append([one[0] if part is None else part.whole(one) for one in given])
    return columns


def zeros_program(shapes: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Fresh accumulators."""
    key = ("zeros", tuple((s.shape, str(s.dtype)) for s in shapes))
    return Program(key, lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes], ())
