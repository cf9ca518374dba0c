"""The shapes and types of values, for whoever has not made them."""

from typing import assert_never

import jax

from jvpipe.ir.layers import Array, LayerGraph, Spec
from jvpipe.ir.values import Value, ValueKind
from jvpipe.programs import weights
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.trace.graph import Traced
from jvpipe.trace.keys import dtype_of


def shape(array: Array) -> jax.ShapeDtypeStruct:
    """An array's shape and type, for JAX."""
    return jax.ShapeDtypeStruct(array.shape, dtype_of(array.dtype))


def value_spec(graph: LayerGraph, optimizer: OptimizerCut, value: Value) -> Spec:
    """How a value lies over the devices of its place; what nobody has laid is whole on each.

    What forwards leave for backwards only their programs know.

    Args:
        graph: the model's.
        optimizer: its update, in pieces.
        value: of one of its runs.
    """
    if value.kind is ValueKind.OPTIMIZER:
        return optimizer.state[value.index].array.spec
    return graph_spec(graph, value.kind, value.index)


def graph_spec(graph: LayerGraph, kind: ValueKind, index: int) -> Spec:
    """How a value lies over the devices of its place, as far as the graph tells it: else it is whole on each.

    Args:
        graph: the model's.
        kind: of the value.
        index: its number among those of its kind.
    """
    match kind:
        case (
            ValueKind.PARAMETER
            | ValueKind.GRADIENT
            | ValueKind.PREDICTED
            | ValueKind.CORRECTED
            | ValueKind.DELTA
            | ValueKind.APPLIED
        ):
            return graph.parameters[index].array.spec
        case ValueKind.TENSOR | ValueKind.COTANGENT:
            return graph.tensors[index].array.spec
        case ValueKind.BATCH:
            return graph.batch[index].spec
        case ValueKind.OPTIMIZER | ValueKind.STATE | ValueKind.CONSTANT | ValueKind.SEED | ValueKind.AUX:
            return ()
        case ValueKind.LOSS | ValueKind.WEIGHT | ValueKind.METRIC | ValueKind.UPDATES | ValueKind.MARK:
            return ()
        case ValueKind.RESIDUAL | ValueKind.HANDED | ValueKind.EXCHANGE:
            return ()
        case _:
            assert_never(kind)


def value_shape(traced: Traced, optimizer: OptimizerCut, value: Value) -> jax.ShapeDtypeStruct | None:
    """The shape and type of a value as the graph tells them; None where only the program that makes it knows.

    Args:
        traced: the model.
        optimizer: its update, in pieces.
        value: of one of its runs.
    """
    graph, i = traced.graph, value.index
    match value.kind:
        case (
            ValueKind.PARAMETER
            | ValueKind.GRADIENT
            | ValueKind.PREDICTED
            | ValueKind.CORRECTED
            | ValueKind.DELTA
            | ValueKind.APPLIED
        ):
            return shape(graph.parameters[i].array)
        case ValueKind.OPTIMIZER:
            return shape(optimizer.state[i].array)
        case ValueKind.TENSOR | ValueKind.COTANGENT:
            return shape(graph.tensors[i].array)
        case ValueKind.STATE:
            return shape(graph.state[i])
        case ValueKind.CONSTANT:
            return shape(graph.constants[i])
        case ValueKind.BATCH:
            return shape(graph.batch[i])
        case ValueKind.AUX:
            return shape(graph.aux[i])
        case ValueKind.LOSS:
            return traced.loss_shapes[i]
        case ValueKind.WEIGHT:
            return traced.loss_shapes[1]
        case ValueKind.UPDATES | ValueKind.MARK:
            return weights.COUNT
        case ValueKind.SEED | ValueKind.RESIDUAL | ValueKind.HANDED | ValueKind.METRIC | ValueKind.EXCHANGE:
            return None
        case _:
            assert_never(value.kind)
