"""The layout of edges and residuals over the devices of a group: as the compiler finds best.

Layers are compiled in order, each with its inputs laid as they were chosen before. How the compiler
then lays what the layer makes is how its readers get it, so that a hidden layer that is cut along
an axis is not joined for the next product. After one pass over the layers everything has a layout,
for no layer reads what a later one makes.
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
    """Returns the layers, with what goes between them laid over a group of devices.

    Args:
        store: where layers are compiled for that.
        traced: the model, whose parameters and batches are laid already.
        group: of devices; the layout is the same for all groups.
    """
    graph, sharding = traced.graph, traced.loss.sharding
    assert sharding is not None
    for layer, body in zip(graph.layers, traced.bodies, strict=True):
        arrays = [_edge(graph, ref) for ref in layer.writes]
        takes = specs(graph, layer.reads)
        laid = _laid(store, evaluation_program(body), takes, arrays, group, sharding)
        # The layers that follow read these tensors as they are laid now.
        written = {ref.index: array for ref, array in zip(layer.writes, laid, strict=True) if array}
        tensors = (replace(t, array=written.get(i, t.array)) for i, t in enumerate(graph.tensors))
        graph = replace(graph, tensors=tuple(tensors))
    return graph


def _edge(graph: LayerGraph, ref: Ref) -> Array | None:
    """Returns what a layer writes for another one.

    Returns None for a value that is not a tensor between layers.
    """
    return graph.tensors[ref.index].array if ref.kind is ValueKind.TENSOR else None


def laid_programs(
    store: ProgramStore,
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    group: Device,
    sharding: Sharding,
) -> tuple[LayerPrograms, ...]:
    """Returns the programs of layers, with what forwards leave for backwards laid over a group of devices.

    Args:
        store: where forwards are compiled for that.
        graph: whose tensors are laid already.
        programs: of each layer.
        group: of devices.
        sharding: has the sizes of its axes.
    """
    laid_programs = []
    for layer, of_layer in zip(graph.layers, programs, strict=True):
        takes, writes = specs(graph, layer.reads), specs(graph, layer.writes)
        # A forward yields what it writes, then its residuals: the layout of the former is fixed.
        results = [*[None] * len(writes), *of_layer.signature.residuals]
        program = forward_program(of_layer)
        laid = _laid(store, program, takes, results, group, sharding, writes)
        residuals = tuple(filter(None, laid[len(writes) :]))
        signature = replace(of_layer.signature, residuals=residuals)
        laid_programs.append(replace(of_layer, signature=signature))
    return tuple(laid_programs)


def specs(graph: LayerGraph, refs: Sequence[Ref]) -> list[Spec]:
    """Returns how what layers read or write lies."""
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
    """Returns the results of a program whose layout is open, as the compiler lays them.

    Returns None for the others.

    Args:
        store: where it is compiled.
        program: that makes them.
        takes: how its inputs lie.
        open_arrays: the results whose layout is open, None for those whose layout is fixed.
        group: of devices.
        sharding: has the sizes of its axes.
        fixed: how the first results lie, if that is fixed; others are whole on each device.
    """
    assert isinstance(group, DeviceGroup)
    specs = [*fixed, *[()] * (len(open_arrays) - len(fixed))]
    gives = [
        spec if array is None else None for spec, array in zip(specs, open_arrays, strict=True)
    ]
    (executable,) = store.compile([(program.laid(takes, gives), group)])
    chosen = [_chosen(of_result) for of_result in executable.output_shardings]
    # JAX's shardings cut arrays only into equal parts: others stay as they are.
    return [
        sharding.laid(array, spec) if array and sharding.divides(array.shape, spec) else array
        for array, spec in zip(open_arrays, chosen, strict=False)
    ]


def _chosen(sharding: object) -> Spec:
    """Returns the axes along which the compiler cuts a result; trailing dimensions that it leaves whole go unnamed."""
    entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    while entries and not entries[-1]:
        entries = entries[:-1]
    return entries
