"""What layers exchange, and leave for their backwards, over the devices of a group: as the compiler finds it best.

A layer is compiled with what it reads lying as it is known to lie. How the compiler then lays what the layer makes is
how its readers get it: a hidden layer that is cut along an axis is not put together for the next product.
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
    """The layers, with what goes between them laid over a group of devices.

    Args:
        store: where layers are compiled for that.
        traced: the model, whose parameters and batches are laid already.
        group: of devices; all groups lay alike.
    """
    graph, sharding = traced.graph, traced.loss.sharding
    assert sharding is not None
    for layer, body in zip(graph.layers, traced.bodies, strict=True):
        arrays = [
            graph.tensors[ref.index].array if ref.kind is ValueKind.TENSOR else None
            for ref in layer.writes
        ]
        laid = _laid(
            store, evaluation_program(body), specs(graph, layer.reads), arrays, group, sharding
        )
        written = {ref.index: array for ref, array in zip(layer.writes, laid, strict=True) if array}
        tensors = (replace(t, array=written.get(i, t.array)) for i, t in enumerate(graph.tensors))
        graph = replace(graph, tensors=tuple(tensors))
    return graph


def laid_programs(
    store: ProgramStore,
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    group: Device,
    sharding: Sharding,
) -> tuple[LayerPrograms, ...]:
    """The programs of layers, with what forwards leave for backwards laid over a group of devices.

    Args:
        store: where forwards are compiled for that.
        graph: whose tensors are laid already.
        programs: of each layer.
        group: of devices.
        sharding: has the sizes of its axes.
    """
    made = []
    for layer, own in zip(graph.layers, programs, strict=True):
        writes = specs(graph, layer.writes)
        wanted = [*[None] * len(writes), *own.signature.residuals]
        takes = specs(graph, layer.reads)
        residuals = _laid(store, forward_program(own), takes, wanted, group, sharding, writes)[
            len(writes) :
        ]
        made.append(
            replace(own, signature=replace(own.signature, residuals=tuple(filter(None, residuals))))
        )
    return tuple(made)


def specs(graph: LayerGraph, refs: Sequence[Ref]) -> list[Spec]:
    """How what layers read or write lies."""
    arrays = [graph_array(graph, ref.kind, ref.index) for ref in refs]
    return [array.spec if array else () for array in arrays]


def _laid(
    store: ProgramStore,
    program: Program,
    takes: Sequence[Spec],
    wanted: Sequence[Array | None],
    group: Device,
    sharding: Sharding,
    given: Sequence[Spec] = (),
) -> list[Array | None]:
    """The wanted results of a program, as the compiler lays them; None for the others.

    Args:
        store: where it is compiled.
        program: that makes them.
        takes: how its inputs lie.
        wanted: arrays of no known layout among its results.
        group: of devices.
        sharding: has the sizes of its axes.
        given: how the first results lie, if that is known.
    """
    assert isinstance(group, DeviceGroup)
    known = [*given, *[()] * (len(wanted) - len(given))]
    gives = [spec if array is None else None for spec, array in zip(known, wanted, strict=True)]
    (executable,) = store.compile([(program.laid(takes, gives), group)])
    chosen = [_chosen(each) for each in executable.output_shardings]
    return [
        sharding.laid(array, spec) if array and sharding.divides(array.shape, spec) else array
        for array, spec in zip(wanted, chosen, strict=False)
    ]


def _chosen(sharding: object) -> Spec:
    """The axes along which the compiler cuts a result."""
    entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    while entries and not entries[-1]:
        entries = entries[:-1]
    return entries
