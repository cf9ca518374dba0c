"""Lets the compiler choose how tensors between layers, and residuals, are cut over a mesh.

A mesh is called a group of devices here. Residuals are the values that a forward leaves for its
backward. The layout of an array says which axes of the mesh cut each of its dimensions; it is given
as a spec.

Layers are compiled in order. The layouts of a layer's inputs are known: those of parameters and
batches are given, and those of tensors were chosen when an earlier layer was compiled. The compiler
chooses the layouts of the layer's results. Later layers then read the results in these layouts. So
an activation that is cut along an axis of the mesh need not be joined before the next product. One
pass is enough, because no layer reads a tensor that a later layer makes.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import NamedSharding

from jvpipe.ir.layers import Array, LayerGraph, Ref, Spec
from jvpipe.ir.sharding import Sharding
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.graph_arrays import graph_array
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import evaluation_program, forward_program
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device, DeviceGroup


def laid_graph(store: ProgramStore, traced: Traced, group: Device) -> LayerGraph:
    """Returns the layers, with layouts of the tensors between them over a group of devices.

    Args:
        store: compiles the layers, to learn the layouts.
        traced: the model; its parameters and batches already have layouts.
        group: any group of devices. All groups have the same axes, and so the same layouts.
    """
    graph, sharding = traced.graph, traced.loss.sharding
    assert sharding is not None
    for layer, body in zip(graph.layers, traced.bodies, strict=True):
        arrays = [_edge(graph, ref) for ref in layer.writes]
        takes = specs(graph, layer.reads)
        laid = _laid(
            store,
            evaluation_program(body),
            takes,
            arrays,
            group,
            sharding,
        )
        # Later layers read these tensors in the layouts found here.
        tensors = list(graph.tensors)
        for ref, array in zip(layer.writes, laid, strict=True):
            if array:
                tensors[ref.index] = replace(tensors[ref.index], array=array)
        graph = replace(graph, tensors=tuple(tensors))
    return graph


def _edge(graph: LayerGraph, ref: Ref) -> Array | None:
    """Returns the array of a tensor between layers; None for any other value."""
    return graph.tensors[ref.index].array if ref.kind is ValueKind.TENSOR else None


def laid_programs(
    store: ProgramStore,
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    group: Device,
    sharding: Sharding,
) -> tuple[LayerPrograms, ...]:
    """Returns the programs of layers, with layouts of their residuals over a group of devices.

    Args:
        store: compiles the forwards, to learn the layouts.
        graph: the layers, with layouts of the tensors between them.
        programs: the programs of each layer.
        group: the group of devices.
        sharding: has the sizes of the group's axes.
    """
    laid_programs = []
    for layer, of_layer in zip(graph.layers, programs, strict=True):
        takes, writes = specs(graph, layer.reads), specs(graph, layer.writes)
        # A forward yields the values that it writes, and then its residuals. `laid_graph` has fixed
        # the layouts of the written values.
        results = [*[None] * len(writes), *of_layer.signature.residuals]
        program = forward_program(of_layer)
        laid = _laid(
            store,
            program,
            takes,
            results,
            group,
            sharding,
            writes,
        )
        residuals = tuple(filter(None, laid[len(writes) :]))
        signature = replace(of_layer.signature, residuals=residuals)
        laid_programs.append(replace(of_layer, signature=signature))
    return tuple(laid_programs)


def specs(graph: LayerGraph, refs: Sequence[Ref]) -> list[Spec]:
    """Returns the layouts of values that layers read or write.

    Args:
        graph: the layers, with the layouts.
        refs: the values.
    """
    arrays = [graph_array(graph, ref.kind, ref.index) for ref in refs]
    return [array.spec if array else () for array in arrays]


def _laid(
    store: ProgramStore,
    program: Program,
    takes: Sequence[Spec],
    open_arrays: Sequence[Array | None],
    group: Device,
    sharding: Sharding,
    fixed: Sequence[Spec] = (),
) -> list[Array | None]:
    """Returns the results of a program in the layouts that the compiler chooses for them.

    Both `open_arrays` and the returned list have None for a result with a fixed layout.

    Args:
        store: compiles the program.
        program: the program that makes the results.
        takes: the layouts of the program's inputs.
        open_arrays: the results whose layouts the compiler chooses.
        group: the group of devices.
        sharding: has the sizes of the group's axes.
        fixed: the layouts of the first results, if these are fixed. A fixed result without an entry
            here is whole on each device.
    """
    assert isinstance(group, DeviceGroup)
    gives: list[Spec | None] = []  # None lets the compiler choose
    for i, array in enumerate(open_arrays):
        spec = fixed[i] if i < len(fixed) else ()
        gives.append(spec if array is None else None)
    (executable,) = store.compile([(program.laid(takes, gives), group)])
    chosen = [_chosen(of_result) for of_result in executable.output_shardings]
    # JAX cuts arrays into equal parts. An array that the chosen layout cannot divide into equal
    # parts keeps the layout that it had.
    laid: list[Array | None] = []
    for array, spec in zip(open_arrays, chosen, strict=False):
        is_cut = array and sharding.divides(array.shape, spec)
        laid.append(sharding.laid(array, spec) if array and is_cut else array)
    return laid


def _chosen(sharding: object) -> Spec:
    """Returns the mesh axes that cut each dimension, up to the last dimension that is cut."""
    entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    while entries and not entries[-1]:
        entries = entries[:-1]
    return entries
