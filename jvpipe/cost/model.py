"""A traced model as planners see it: seconds and bytes of its layers, and the values between them.

The bytes follow the buffer table of a lowered step, so that what a stage is said to need covers what it will hold.
A value is held if a backward reads it: from its making until then, per micro-batch in flight. All others pass: they
are alive while a few layers run, and count among the temporaries of these.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared, SplitCost
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature
from jvpipe.ir.outline import outline_of
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Piece, Slot, SlotKind

_EXCHANGED = (SlotKind.WEIGHT, SlotKind.KEPT, SlotKind.PARTIAL, SlotKind.GLOBAL)
"""What there is beside gradients, parameters and state while an update runs."""


@dataclass(frozen=True, slots=True)
class Work:
    """The seconds and bytes of a layer's programs on one micro-batch, with all candidates kept, and of its update.

    Temporaries are what a program needs beside its inputs and results; those of the update are the optimizer's.
    """

    forward_s: float
    backward_s: float
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    update_temporary_bytes: int = 0
    update_s: float = 0.0


def with_updates(
    works: Sequence[Work], loss: int, optimizer: OptimizerCut, seconds: Callable[[Piece], float]
) -> list[Work]:
    """The works of layers with the seconds of their updates.

    Args:
        works: of each layer.
        loss: the layer of the loss, where the optimizer's global program runs.
        optimizer: in pieces.
        seconds: those of a piece.
    """
    taken_s = [0.0] * len(works)
    for piece in optimizer.update:
        taken_s[loss if piece.layer is None else piece.layer] += seconds(piece)
    return [replace(work, update_s=s) for work, s in zip(works, taken_s, strict=True)]


def costs_of(
    graph: LayerGraph,
    signatures: Sequence[Signature],
    works: Sequence[Work],
    options: Sequence[Sequence[Option]] | None = None,
    optimizer: OptimizerCut | None = None,
    microbatches: int = 1,
    splits: Sequence[SplitCost | None] | None = None,
) -> Costs:
    """The costs of a model.

    Args:
        graph: its layers, tensors and parameters.
        signatures: of each layer's programs with all candidates kept.
        works: seconds and temporaries of each layer.
        options: of each layer, the first of which keeps everything; by default there is no other.
        optimizer: its state and what its update needs; None: neither is counted.
        microbatches: in a step; their losses and aux values are held until its end.
        splits: of each layer; None: nobody asked.
    """
    model = _Model(graph, signatures)
    layers = []
    for layer, signature, work in zip(graph.layers, signatures, works, strict=True):
        everything = (Option(sum(a.bytes for a in signature.residuals)),)
        layers.append(
            LayerCost(
                name=layer.name,
                forward_s=work.forward_s,
                backward_s=work.backward_s,
                options=everything if options is None else tuple(options[layer.id]),
                parameter_bytes=sum(
                    p.array.bytes
                    for p in graph.parameters
                    if p.readers == (layer.id,) and not p.frozen
                ),
                gradient_bytes=_summed_bytes(graph, layer, microbatches),
                optimizer_bytes=model.lasting_bytes(layer.id)
                + _state_bytes(graph, layer.id, optimizer),
                input_bytes=sum(graph.tensors[t].array.bytes for t in model.own_inputs(layer)),
                temporary_bytes=max(
                    work.forward_temporary_bytes + model.passing_forward_bytes(layer),
                    work.backward_temporary_bytes + model.passing_backward_bytes(layer),
                    work.update_temporary_bytes + _update_bytes(graph, layer.id, optimizer),
                    _metric_bytes(graph, microbatches) if layer.id == graph.loss_layer else 0,
                ),
                split=None if splits is None else splits[layer.id],
                state_bytes=0 if optimizer is None else _bytes_held(optimizer, layer.id),
                update_s=work.update_s,
            )
        )
    edges = tuple(
        Edge(t.producer, t.readers, t.array.bytes, t.array.name, t.differentiable)
        for t in graph.tensors
    )
    ids = tuple(layer.id for layer in graph.layers)
    described = {"carried": carried(graph), "outline": outline_of(graph, microbatches)}
    return Costs(tuple(layers), edges, tuple(model.shared()), ids=ids, **described)


def carried(graph: LayerGraph) -> tuple[tuple[int, ...], ...]:
    """Groups of layers from one that reads a leaf of the model state to one that writes it for the next micro-batch.

    Where a device runs several stages, these have to share one: else its next forward waits for a later stage's.
    """
    layers, groups = graph.layers, []
    for k in range(len(graph.state)):
        touching = [
            x.id for x in layers if k in (*x.reading(ValueKind.STATE), *x.writing(ValueKind.STATE))
        ]
        written = any(k in layer.writing(ValueKind.STATE) for layer in layers)
        if written and len(touching) > 1:
            groups.append(tuple(range(touching[0], touching[-1] + 1)))
    return tuple(groups)


def split_costs(
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    seconds: Callable[[LayerPrograms], tuple[float, float]],
) -> list[SplitCost | None]:
    """The costs of each layer's backward in halves; None for those that have none. Layers alike are asked for once.

    Args:
        graph: the layers.
        programs: of each layer, with all candidates kept.
        seconds: those of the two halves of some programs.
    """
    distinct = {
        id(layer_programs): layer_programs
        for layer_programs in programs
        if layer_programs.halves is not None
    }
    took = {key: seconds(layer_programs) for key, layer_programs in distinct.items()}
    pairs = zip(graph.layers, programs, strict=True)
    return [
        _split_cost(graph, layer, layer_programs, *took[id(layer_programs)])
        if id(layer_programs) in took
        else None
        for layer, layer_programs in pairs
    ]


def _split_cost(
    graph: LayerGraph, layer: Layer, programs: LayerPrograms, input_s: float, weight_s: float
) -> SplitCost:
    assert programs.halves is not None
    split = programs.halves.signature
    values = {"input": layer.reads, "output": layer.writes}
    read = [values[kind][i] for kind, i in split.weight.sources if kind != "residual"]
    read += [layer.writes[i] for i in split.weight.cotangents]  # each as large as what it is of
    kept = sum(graph.tensors[ref.index].array.bytes for ref in read if ref.kind == ValueKind.TENSOR)
    kept += sum(
        split.weight.residuals[i].bytes for kind, i in split.weight.sources if kind == "residual"
    )
    return SplitCost(input_s, weight_s, sum(a.bytes for a in split.handed), kept)


def own_inputs(graph: LayerGraph, signatures: Sequence[Signature]) -> list[list[int]]:
    """The tensors that each layer's backward reads and no other's."""
    model = _Model(graph, signatures)
    return [model.own_inputs(layer) for layer in graph.layers]


class _Model:
    """The holders of values: `holders[ref]` are the layers whose backward reads what a forward read or made."""

    def __init__(self, graph: LayerGraph, signatures: Sequence[Signature]) -> None:
        self.graph = graph
        self.holders: dict[Ref, tuple[int, ...]] = {}
        self.touching: dict[
            Ref, tuple[int, ...]
        ] = {}  # the layers whose forward reads or makes a value
        for layer, signature in zip(graph.layers, signatures, strict=True):
            values = {"input": layer.reads, "output": layer.writes}
            read_values = {values[kind][i] for kind, i in signature.sources if kind != "residual"}
            for users, refs in (
                (self.holders, read_values),
                (self.touching, {*layer.reads, *layer.writes}),
            ):
                users.update((ref, (*users.get(ref, ()), layer.id)) for ref in refs)
        arrays: dict[ValueKind, list[int]] = {
            ValueKind.TENSOR: [t.array.bytes for t in graph.tensors],
            ValueKind.BATCH: [a.bytes for a in graph.batch],
            ValueKind.SEED: [graph.seed_bytes],
            ValueKind.STATE: [a.bytes for a in graph.state],
            ValueKind.CONSTANT: [a.bytes for a in graph.constants],
        }
        self.bytes = {
            Ref(kind, i): size for kind, sizes in arrays.items() for i, size in enumerate(sizes)
        }

    def own_inputs(self, layer: Layer) -> list[int]:
        return [
            t
            for t in layer.reading(ValueKind.TENSOR)
            if self.holders.get(Ref(ValueKind.TENSOR, t)) == (layer.id,)
        ]

    def shared(self) -> Iterator[Shared]:
        """Yields what a stage holds once, however many of its layers read it."""
        for ref, size in self.bytes.items():
            holders, touching = self.holders.get(ref, ()), self.touching.get(ref, (0,))
            if ref.kind in (ValueKind.STATE, ValueKind.CONSTANT) and len(touching) > 1:
                yield Shared(touching, size, per_version=True)
            if ref.kind == ValueKind.CONSTANT or not holders:
                continue
            if (
                len(holders) > 1
                or ref.kind is not ValueKind.TENSOR
                or holders == (self.graph.tensors[ref.index].producer,)
            ):
                yield Shared(holders, size)
        for parameter in self.graph.tied():
            yield Shared(parameter.readers, parameter.array.bytes, per_version=True)

    def lasting_bytes(self, layer: int) -> int:
        """Model state, captured arrays and frozen parameters that no other layer touches: of each one version."""
        lasting = (ref for ref in self.bytes if ref.kind in (ValueKind.STATE, ValueKind.CONSTANT))
        frozen = (p for p in self.graph.parameters if p.frozen and p.readers == (layer,))
        return sum(p.array.bytes for p in frozen) + sum(
            self.bytes[ref] for ref in lasting if self.touching.get(ref, (0,)) == (layer,)
        )

    def passing_forward_bytes(self, layer: Layer) -> int:
        """Values that pass while a layer's forward runs: nobody's backward reads them, or none on this stage."""
        total = sum(self.graph.aux[i].bytes for i in layer.writing(ValueKind.AUX))
        for ref, layers in self.touching.items():
            if (
                ref.kind in (ValueKind.BATCH, ValueKind.SEED, ValueKind.STATE, ValueKind.TENSOR)
                and layers[0] <= layer.id <= layers[-1]
            ):
                holders = self.holders.get(ref, ())
                is_held = bool(holders) if ref.kind == ValueKind.TENSOR else layer.id in holders
                total += 0 if is_held else self.bytes[ref]
        return total

    def passing_backward_bytes(self, layer: Layer) -> int:
        """Cotangents alive while a layer's backward runs."""
        flowing = (t for t in self.graph.tensors if t.differentiable)
        return sum(t.array.bytes for t in flowing if t.producer <= layer.id <= t.readers[-1])


def _summed_bytes(graph: LayerGraph, layer: Layer, microbatches: int) -> int:
    """Counts what a step sums up or collects: gradients; where the loss is, also what each micro-batch gave."""
    trained = graph.trained(layer.reading(ValueKind.PARAMETER))
    total = sum(graph.parameters[p].array.bytes for p in trained)
    if layer.id == graph.loss_layer:
        total += microbatches * (
            (1 + graph.weighted) * graph.loss_bytes + sum(a.bytes for a in graph.aux)
        )
    return total


def _metric_bytes(graph: LayerGraph, microbatches: int) -> int:
    """The results of a step: loss, weight, norm of the gradient; aux values, averaged or one per micro-batch."""
    groups = [
        (graph.aux[members[0]].bytes, graph.aux_reduction(i))
        for i, members in enumerate(graph.aux_groups)
    ]
    return 3 * graph.loss_bytes + sum(
        size * (1 if reduced else microbatches) for size, reduced in groups
    )


def _state_bytes(graph: LayerGraph, layer: int, optimizer: OptimizerCut | None) -> int:
    """The optimizer's state beside a layer; that of the global program lies with the loss."""
    if optimizer is None:
        return 0
    holders = (layer, None) if layer == graph.loss_layer else (layer,)
    return sum(_bytes_held(optimizer, holder) for holder in holders)


def _bytes_held(optimizer: OptimizerCut, holder: int | None) -> int:
    return sum(optimizer.state[i].array.bytes for i in optimizer.held_by(holder))


def _update_bytes(graph: LayerGraph, layer: int, optimizer: OptimizerCut | None) -> int:
    """Counts what the update needs beside gradients, parameters and state: gradients of other layers that read a tied
    parameter, and the values that pieces exchange.
    """
    if optimizer is None:
        return 0
    tied = (p for p in graph.tied() if p.owner == layer and not p.frozen)
    total = sum((len(p.readers) - 1) * p.array.bytes for p in tied)
    holders = (layer, None) if layer == graph.loss_layer else (layer,)
    sizes: dict[Slot, int] = {}
    for piece in (piece for piece in optimizer.update if piece.layer in holders):
        avals = [*piece.program.in_avals, *piece.program.out_avals]
        sizes |= {
            slot: a.size * a.dtype.itemsize
            for slot, a in zip((*piece.reads, *piece.writes), avals, strict=True)
        }
    return total + sum(size for slot, size in sizes.items() if slot.kind in _EXCHANGED)
