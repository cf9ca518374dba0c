"""The shapes and types of values, before they are made."""

from typing import assert_never

import jax

from jvpipe.ir.layers import Array, LayerGraph, Spec
from jvpipe.ir.values import Value, ValueKind
from jvpipe.programs import weights
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.trace.graph import Traced
from jvpipe.trace.keys import dtype_of


def shape(array: Array) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and type, for JAX."""
    return jax.ShapeDtypeStruct(array.shape, dtype_of(array.dtype))


def graph_array(graph: LayerGraph, kind: ValueKind, index: int) -> Array | None:
    """Returns the array of the graph that a value is like.

    What is computed of a parameter has its shape: a gradient, a predicted weight. So has a
    cotangent that of its edge.

    Args:
        graph: the model's.
        kind: of the value.
        index: its number among those of its kind.

    Returns:
        None for what only the optimizer or a program knows.
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
            return graph.parameters[index].array
        case ValueKind.TENSOR | ValueKind.COTANGENT:
            return graph.tensors[index].array
        case ValueKind.STATE:
            return graph.state[index]
        case ValueKind.CONSTANT:
            return graph.constants[index]
        case ValueKind.BATCH:
            return graph.batch[index]
        case ValueKind.AUX:
            return graph.aux[index]
        case (
            ValueKind.OPTIMIZER
            | ValueKind.LOSS
            | ValueKind.WEIGHT
            | ValueKind.UPDATES
            | ValueKind.MARK
            | ValueKind.SEED
            | ValueKind.METRIC
            | ValueKind.RESIDUAL
            | ValueKind.HANDED
            | ValueKind.EXCHANGE
        ):
            return None
        case _:
            assert_never(kind)


def value_array(graph: LayerGraph, optimizer: OptimizerCut, value: Value) -> Array | None:
    """Returns the array of the graph or of the optimizer that a value is like.

    Returns None for what only a program knows.

    Args:
        graph: the model's.
        optimizer: its update, in pieces.
        value: of one of its runs.
    """
    if value.kind is ValueKind.OPTIMIZER:
        return optimizer.state[value.index].array
    return graph_array(graph, value.kind, value.index)


def value_spec(graph: LayerGraph, optimizer: OptimizerCut, value: Value) -> Spec:
    """Returns how a value lies over the devices of its place.

    An array without a layout is whole on each. The layout of residuals is not among these: only the
    programs that leave them know it.

    Args:
        graph: the model's.
        optimizer: its update, in pieces.
        value: of one of its runs.
    """
    array = value_array(graph, optimizer, value)
    return array.spec if array else ()


def value_shape(
    traced: Traced, optimizer: OptimizerCut, value: Value
) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and type of a value; None if only the program that makes it knows.

    Args:
        traced: the model.
        optimizer: its update, in pieces.
        value: of one of its runs.
    """
    array = value_array(traced.graph, optimizer, value)
    if array:
        return shape(array)
    if value.kind is ValueKind.LOSS:
        return traced.loss_shapes[value.index]
    if value.kind is ValueKind.WEIGHT:
        return traced.loss_shapes[1]
    return weights.COUNT if value.kind in (ValueKind.UPDATES, ValueKind.MARK) else None
