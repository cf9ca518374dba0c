"""The layout of tensors between layers, and of residuals, over a mesh: as the compiler chooses.

Layers are compiled in order, each with its inputs in the layouts chosen so far. The layout that the
compiler chooses for the results of a layer is then the one in which later layers read them. So an
activation that is cut along an axis of the mesh need not be joined before the next product. After
one pass every tensor has a layout, because no layer reads a tensor that a later one makes. A mesh
is called a group of devices here; residuals are the values that a forward leaves for its backward.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import NamedSharding

from jvpipe._jax import Device, DeviceGroup
from jvpipe.ir.layers import Array, LayerGraph, Ref, Spec
from jvpipe.ir.sharding import Sharding
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import evaluation_program, forward_program
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.value_shapes import graph_array
from jvpipe.trace.graph import Traced


def laid_graph(store: ProgramStore, traced: Traced, group: Device) -> LayerGraph:
    """Returns the layers, with layouts of the tensors between them over a group of devices.

    Args:
        store: compiles the layers, to learn the layouts.
        traced: the model, whose parameters and batches have layouts already.
        group: a group of devices; the layouts are the same for all groups.
    """
    graph, sharding = traced.graph, traced.loss.sharding
    assert sharding is not None
    for layer, body in zip(graph.layers, traced.bodies, strict=True):
        arrays = [_edge(graph, ref) for ref in layer.writes]
        takes = specs(graph, layer.reads)
        laid = _laid(store, evaluation_program(body), takes, arrays, group, sharding)
        # Later layers read these tensors in the layouts found here.
        written = {ref.index: array for ref, array in zip(layer.writes, laid, strict=True) if array}
        tensors = (replace(t, array=written.get(i, t.array)) for i, t in enumerate(graph.tensors))
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
        # A forward yields the values that it writes, whose layout is fixed, and then its residuals.
        results = [*[None] * len(writes), *of_layer.signature.residuals]
        program = forward_program(of_layer)
        laid = _laid(store, program, takes, results, group, sharding, writes)
        residuals = tuple(filter(None, laid[len(writes) :]))
        signature = replace(of_layer.signature, residuals=residuals)
        laid_programs.append(replace(of_layer, signature=signature))
    return tuple(laid_programs)


def specs(graph: LayerGraph, refs: Sequence[Ref]) -> list[Spec]:
    """Returns the layouts of values that layers read or write."""
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

    Args:
        store: compiles the program.
        program: the program that makes the results.
        takes: the layouts of its inputs.
        open_arrays: the result for each layout that the compiler chooses; None, also in what is
            returned, for a result with a fixed layout.
        group: the group of devices.
        sharding: has the sizes of the group's axes.
        fixed: the layouts of the first results; other fixed results are whole on each device.
    """
    assert isinstance(group, DeviceGroup)
    specs = [*fixed, *[()] * (len(open_arrays) - len(fixed))]
    gives = [
        spec if array is None else None for spec, array in zip(specs, open_arrays, strict=True)
    ]
    (executable,) = store.compile([(program.laid(takes, gives), group)])
    chosen = [_chosen(of_result) for of_result in executable.output_shardings]
    # JAX's shardings divide arrays only into equal parts. Other arrays keep the layout they had.
    return [
        sharding.laid(array, spec) if array and sharding.divides(array.shape, spec) else array
        for array, spec in zip(open_arrays, chosen, strict=False)
    ]


def _chosen(sharding: object) -> Spec:
    """Returns the axes along which the compiler cuts a result; omits trailing whole dimensions."""
    entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    while entries and not entries[-1]:
        entries = entries[:-1]
    return entries
