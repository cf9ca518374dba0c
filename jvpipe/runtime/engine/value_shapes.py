"""Finds the shape, type and layout of a value of a run before the value is made.

The layout says how a value is cut over the devices of a mesh. For most values, the model's graph,
the optimizer or the loss gives the shape, type and layout. For other values, such as residuals,
only the programs that make the values give them.
"""

import jax

from jvpipe.ir.layers import Array, LayerGraph, Spec
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.graph_arrays import graph_array
from jvpipe.programs import weight_programs
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.trace.graph import Traced
from jvpipe.trace.keys import dtype_of


def shape(array: Array) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and type, for JAX."""
    return jax.ShapeDtypeStruct(array.shape, dtype_of(array.dtype))


def value_array(graph: LayerGraph, optimizer: OptimizerCut, value: Value) -> Array | None:
    """Returns the array of the graph or the optimizer that has the shape and type of a value.

    Returns None if neither has such an array, as for a residual or a loss.

    Args:
        graph: the model's layers.
        optimizer: the optimizer's update, cut into pieces.
        value: a value of a run of the model.
    """
    if value.kind is ValueKind.OPTIMIZER:
        return optimizer.state[value.index].array
    return graph_array(graph, value.kind, value.index)


def value_spec(graph: LayerGraph, optimizer: OptimizerCut, value: Value) -> Spec:
    """Returns the mesh axes along which a value is cut; empty if each device has all of it.

    Do not call this for a residual: only the program that makes the residual has its layout.

    Args:
        graph: the model's layers.
        optimizer: the optimizer's update, cut into pieces.
        value: a value of a run of the model.
    """
    array = value_array(graph, optimizer, value)
    return array.spec if array else ()


def value_shape(
    traced: Traced,
    optimizer: OptimizerCut,
    value: Value,
) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and type of a value; None if only the program that makes it knows them.

    Args:
        traced: the model.
        optimizer: the optimizer's update, cut into pieces.
        value: a value of a run of the model.
    """
    array = value_array(traced.graph, optimizer, value)
    if array:
        return shape(array)
    if value.kind is ValueKind.LOSS:
        return traced.loss_shapes[value.index]
    if value.kind is ValueKind.WEIGHT:
        return jax.ShapeDtypeStruct((), traced.graph.weight_type)
    return weight_programs.COUNT if value.kind in (ValueKind.UPDATES, ValueKind.MARK) else None
