"""Finds the array of a layer graph that has the shape, type and bytes of a value."""

from typing import assert_never

from jvpipe.ir.layers import Array, LayerGraph
from jvpipe.ir.values import ValueKind


def graph_array(graph: LayerGraph, kind: ValueKind, index: int) -> Array | None:
    """Returns the array of the graph that has the shape, type and layout of a value.

    The gradient of a parameter, predicted or corrected weights, and records of updates have the
    parameter's array. A cotangent has the array of its tensor.

    Args:
        graph: the model's layers.
        kind: the kind of the value.
        index: the number of the value among those of its kind.

    Returns:
        The array; None for a value whose shape is not in the graph.
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
