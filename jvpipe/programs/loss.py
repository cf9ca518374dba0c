"""The small programs around the layers: the sum of the losses, and fresh accumulators."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.ir.layers import LayerGraph
from jvpipe.programs.store import Program


def loss_program(graph: LayerGraph, inputs: Sequence[Any], microbatches: int) -> Program:
    """Reduces what the micro-batches gave, in ascending order.

    The loss is the mean over micro-batches, or `sum(total) / sum(weight)`; the weight follows. Each leaf of aux is
    reduced likewise if it is `Weighted` or a floating-point scalar; others are stacked along a new first axis.

    Args:
        graph: whose losses and aux.
        inputs: the shapes of all losses, then of all aux, each of all micro-batches.
        microbatches: how many.
    """

    def total(values: Sequence[jax.Array]) -> jax.Array:
        result = values[0]
        for value in values[1:]:
            result = result + value
        return result

    def reduce(*values: jax.Array) -> list[jax.Array]:
        columns = [values[i : i + microbatches] for i in range(0, len(values), microbatches)]
        losses, aux = columns[: 1 + graph.weighted], columns[1 + graph.weighted :]
        loss = total(losses[0])
        if graph.weighted:
            weight = total(losses[1])
            out = [loss / weight.astype(loss.dtype), weight.astype(jnp.float32)]
        else:
            out = [loss / np.asarray(microbatches, loss.dtype)]
        for group, members in enumerate(graph.aux_groups):
            parts = [aux[i] for i in members]
            if len(parts) == 2:
                sums = total(parts[0]), total(parts[1])
                out.append(sums[0] / sums[1].astype(sums[0].dtype))
            elif graph.aux_reduced(group):
                out.append(total(parts[0]) / np.asarray(microbatches, parts[0][0].dtype))
            else:
                out.append(jnp.stack(parts[0]))
        return out

    shapes = tuple(inputs)
    key = ("loss", graph.weighted, graph.aux_groups, tuple((s.shape, str(s.dtype)) for s in shapes), microbatches)
    return Program(key, reduce, shapes)


def zeros_program(shapes: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Fresh accumulators."""
    key = ("zeros", tuple((s.shape, str(s.dtype)) for s in shapes))
    return Program(key, lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes], ())
