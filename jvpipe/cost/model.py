"""A traced model as planners see it: seconds and bytes of its layers, and the values between them.

The bytes follow the buffer table of a lowered step, so that the bytes of a stage are never fewer
than what it will hold. A value is held if a backward reads it: from its making until then, per
micro-batch in flight. All other values pass: they are alive while a few layers run, and count among
the temporaries of these layers.

    layers of a stage       0   1   2   3
    a value                 w---r-------r            w: layer 0 writes it; r: layers 1 and 3 read it
      layer 1's backward    holders (1,): its own    reads it: held for layer 1
      layers 1's and 3's    holders (1, 3): shared   read it: the stage holds it once
      nobody's backward     passes                   a temporary of the forwards of 0, 1, 2 and 3
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared, SplitCost
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature, Tensor
from jvpipe.ir.outline import outline_of
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Piece, Slot, SlotKind

_EXCHANGED = (SlotKind.WEIGHT, SlotKind.KEPT, SlotKind.PARTIAL, SlotKind.GLOBAL)
"""The arrays of an update that are none of gradients, parameters and state."""
_LASTING = (ValueKind.STATE, ValueKind.CONSTANT)
_PASSING = (ValueKind.BATCH, ValueKind.SEED, ValueKind.STATE, ValueKind.TENSOR)


@dataclass(frozen=True, slots=True)
class Work:
    """The seconds and bytes of a layer's programs on one micro-batch, and of its update.

    All candidates are kept. Temporaries are what a program needs beside its inputs and results.
    """

    forward_s: float
    backward_s: float
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    update_temporary_bytes: int = 0
    update_s: float = 0.0


def with_update_seconds(
    works: Sequence[Work],
    loss: int,
    optimizer: OptimizerCut,
    seconds: Callable[[Piece], float],
) -> list[Work]:
    """Returns the works of layers with the seconds of their updates.

    Args:
        works: of each layer.
        loss: the layer of the loss, where the optimizer's global program runs.
        optimizer: in pieces.
        seconds: returns the seconds of a piece.
    """
    updates_s = [0.0] * len(works)
    for piece in optimizer.update:
        layer = loss if piece.layer is None else piece.layer
        updates_s[layer] += seconds(piece)
    pairs = zip(works, updates_s, strict=True)
    return [replace(work, update_s=update_s) for work, update_s in pairs]


def costs_of(
    graph: LayerGraph,
    signatures: Sequence[Signature],
    works: Sequence[Work],
    options: Sequence[Sequence[Option]] | None = None,
    optimizer: OptimizerCut | None = None,
    microbatches: int = 1,
    splits: Sequence[SplitCost | None] | None = None,
) -> Costs:
    """Collects the costs of a model.

    Args:
        graph: its layers, tensors and parameters.
        signatures: of each layer's programs with all candidates kept.
        works: seconds and temporaries of each layer.
        options: of each layer, the first of which keeps everything; None if there is no other.
        optimizer: its state and what its update needs; None if neither is counted.
        microbatches: in a step; their losses and aux values are held until its end.
        splits: the backward in halves of each layer; None if backwards run whole.
    """
    model = _Model(graph, signatures)
    layers = []
    for layer, signature, work in zip(graph.layers, signatures, works, strict=True):
        everything = Option(sum(array.bytes for array in signature.residuals))
        cost = _layer_cost(model, layer, work, optimizer, microbatches)
        layers.append(
            replace(
                cost,
                options=(everything,) if options is None else tuple(options[layer.id]),
                split=None if splits is None else splits[layer.id],
            )
        )
    return Costs(
        tuple(layers),
        tuple(map(_edge, graph.tensors)),
        tuple(model.shared()),
        ids=tuple(layer.id for layer in graph.layers),
        carried=carried(graph),
        outline=outline_of(graph, microbatches),
    )


def _edge(tensor: Tensor) -> Edge:
    return Edge(
        tensor.producer,
        tensor.readers,
        tensor.array.bytes,
        tensor.array.name,
        tensor.differentiable,
    )


def _layer_cost(
    model: "_Model",
    layer: Layer,
    work: Work,
    optimizer: OptimizerCut | None,
    microbatches: int,
) -> LayerCost:
    """Returns the cost of a layer, without its options and its backward in halves.

    Args:
        model: that has the layer.
        layer: whose cost.
        work: the seconds and temporaries of its programs.
        optimizer: its state and what its update needs; None if neither is counted.
        microbatches: in a step.
    """
    graph = model.graph
    own_tensors = (graph.tensors[t] for t in model.own_inputs(layer))
    trained = (p for p in graph.parameters if p.readers == (layer.id,) and not p.frozen)
    lasting_bytes = model.lasting_bytes(layer.id)
    forward_bytes = work.forward_temporary_bytes + model.passing_forward_bytes(layer)
    backward_bytes = work.backward_temporary_bytes + model.passing_backward_bytes(layer)
    update_bytes = work.update_temporary_bytes + _update_bytes(graph, layer.id, optimizer)
    ending_bytes = _metric_bytes(graph, microbatches) if layer.id == graph.loss_layer else 0
    return LayerCost(
        name=layer.name,
        forward_s=work.forward_s,
        backward_s=work.backward_s,
        options=(),
        parameter_bytes=sum(p.array.bytes for p in trained),
        gradient_bytes=_summed_bytes(graph, layer, microbatches),
        optimizer_bytes=lasting_bytes + _state_bytes(graph, layer.id, optimizer),
        input_bytes=sum(tensor.array.bytes for tensor in own_tensors),
        # Programs of a device run one after another, so the largest counts.
        temporary_bytes=max(forward_bytes, backward_bytes, update_bytes, ending_bytes),
        state_bytes=0 if optimizer is None else _bytes_held(optimizer, layer.id),
        update_s=work.update_s,
    )


def carried(graph: LayerGraph) -> tuple[tuple[int, ...], ...]:
    """Finds the groups of layers that a leaf of the model state goes through, reader to writer.

    The written leaf is read by the next micro-batch. If a device ran the first and the last of a
    group as two stages, its next forward would wait for a later stage; so it runs them as one.
    """
    groups = []
    for leaf in range(len(graph.state)):
        readers = {layer.id for layer in graph.layers if leaf in layer.reading(ValueKind.STATE)}
        writers = {layer.id for layer in graph.layers if leaf in layer.writing(ValueKind.STATE)}
        touching = readers | writers
        if writers and len(touching) > 1:
            groups.append(tuple(range(min(touching), max(touching) + 1)))
    return tuple(groups)


def split_costs(
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    seconds: Callable[[LayerPrograms], tuple[float, float]],
) -> list[SplitCost | None]:
    """Returns the costs of each layer's backward in halves.

    None for a layer whose backward has none.

    Args:
        graph: the layers.
        programs: of each layer, with all candidates kept; equal layers share theirs.
        seconds: returns the seconds of both halves; it is asked once for programs that are shared.
    """
    halves_s: dict[int, tuple[float, float]] = {}
    splits: list[SplitCost | None] = []
    for layer, of_layer in zip(graph.layers, programs, strict=True):
        if of_layer.halves is None:
            splits.append(None)
            continue
        key = id(of_layer)
        if key not in halves_s:
            halves_s[key] = seconds(of_layer)
        splits.append(_split_cost(graph, layer, of_layer, *halves_s[key]))
    return splits


def _split_cost(
    graph: LayerGraph,
    layer: Layer,
    programs: LayerPrograms,
    input_s: float,
    weight_s: float,
) -> SplitCost:
    assert programs.halves is not None
    split = programs.halves.signature
    values = {"input": layer.reads, "output": layer.writes}
    kept_bytes = 0
    read: list[Ref] = []
    for kind, i in split.weight.sources:
        if kind == "residual":
            kept_bytes += split.weight.residuals[i].bytes
        else:
            read.append(values[kind][i])
    # A cotangent is as large as the output that it belongs to.
    read += [layer.writes[i] for i in split.weight.cotangents]
    tensors = [graph.tensors[ref.index] for ref in read if ref.kind == ValueKind.TENSOR]
    kept_bytes += sum(tensor.array.bytes for tensor in tensors)
    return SplitCost(
        input_s,
        weight_s,
        sum(a.bytes for a in split.handed),
        kept_bytes,
    )


def own_inputs(graph: LayerGraph, signatures: Sequence[Signature]) -> list[list[int]]:
    """Returns for each layer the tensors that its backward reads and no other's."""
    model = _Model(graph, signatures)
    return [model.own_inputs(layer) for layer in graph.layers]


class _Model:
    """The layers that each value concerns, and its bytes.

    Attributes:
        holders: by value, the layers whose backward reads it.
        touching: by value, the layers whose forward reads or makes it.
        bytes: by value; parameters and aux values are not among them.
    """

    def __init__(self, graph: LayerGraph, signatures: Sequence[Signature]) -> None:
        self.graph = graph
        self.holders: dict[Ref, tuple[int, ...]] = {}
        self.touching: dict[Ref, tuple[int, ...]] = {}
        for layer, signature in zip(graph.layers, signatures, strict=True):
            values = {"input": layer.reads, "output": layer.writes}
            left = [(kind, i) for kind, i in signature.sources if kind != "residual"]
            for ref in {values[kind][i] for kind, i in left}:
                _append(self.holders, ref, layer.id)
            for ref in {*layer.reads, *layer.writes}:
                _append(self.touching, ref, layer.id)
        self.bytes: dict[Ref, int] = {}
        self._add_bytes(ValueKind.TENSOR, [tensor.array.bytes for tensor in graph.tensors])
        self._add_bytes(ValueKind.BATCH, [array.bytes for array in graph.batch])
        self._add_bytes(ValueKind.SEED, [graph.seed_bytes])
        self._add_bytes(ValueKind.STATE, [array.bytes for array in graph.state])
        self._add_bytes(ValueKind.CONSTANT, [array.bytes for array in graph.constants])

    def _add_bytes(self, kind: ValueKind, sizes: Sequence[int]) -> None:
        for i, size in enumerate(sizes):
            self.bytes[Ref(kind, i)] = size

    def own_inputs(self, layer: Layer) -> list[int]:
        """Returns the tensors that a layer's forward reads, and of all backwards only its own."""
        alone = []
        for tensor in layer.reading(ValueKind.TENSOR):
            ref = Ref(ValueKind.TENSOR, tensor)
            if self.holders.get(ref) == (layer.id,):
                alone.append(tensor)
        return alone

    def shared(self) -> Iterator[Shared]:
        """Yields what a stage holds once, however many of its layers read it."""
        for ref, size in self.bytes.items():
            # What no layer touches lies with the first.
            touching = self.touching.get(ref, (0,))
            if ref.kind in _LASTING and len(touching) > 1:
                yield Shared(touching, size, per_version=True)
            if ref.kind != ValueKind.CONSTANT and self._is_held_apart(ref):
                yield Shared(self.holders[ref], size)
        for parameter in self.graph.tied():
            yield Shared(parameter.readers, parameter.array.bytes, per_version=True)

    def _is_held_apart(self, ref: Ref) -> bool:
        """Tells whether a value is held, and is not an input that one layer holds alone."""
        holders = self.holders.get(ref, ())
        if len(holders) != 1 or ref.kind is not ValueKind.TENSOR:
            return bool(holders)
        # An output that only its own layer's backward reads is held, but no input of a layer.
        return holders == (self.graph.tensors[ref.index].producer,)

    def lasting_bytes(self, layer: int) -> int:
        """Counts model state, captured arrays and frozen parameters that no other layer touches."""
        frozen = [p for p in self.graph.parameters if p.frozen and p.readers == (layer,)]
        total = sum(p.array.bytes for p in frozen)
        for ref, size in self.bytes.items():
            # What no layer touches lies with the first.
            if ref.kind in _LASTING and self.touching.get(ref, (0,)) == (layer,):
                total += size
        return total

    def passing_forward_bytes(self, layer: Layer) -> int:
        """Counts values that pass while a layer's forward runs: no backward of its stage reads
        them.
        """
        total = sum(self.graph.aux[i].bytes for i in layer.writing(ValueKind.AUX))
        for ref, layers in self.touching.items():
            is_alive = layers[0] <= layer.id <= layers[-1]
            if ref.kind not in _PASSING or not is_alive:
                continue
            holders = self.holders.get(ref, ())
            is_held = bool(holders) if ref.kind == ValueKind.TENSOR else layer.id in holders
            if not is_held:
                total += self.bytes[ref]
        return total

    def passing_backward_bytes(self, layer: Layer) -> int:
        """Counts cotangents that are alive while a layer's backward runs."""
        total = 0
        for tensor in self.graph.tensors:
            # The cotangent flows from the last reader back to the producer.
            is_alive = tensor.producer <= layer.id <= tensor.readers[-1]
            if tensor.differentiable and is_alive:
                total += tensor.array.bytes
        return total


def _append(layers: dict[Ref, tuple[int, ...]], ref: Ref, layer: int) -> None:
    layers[ref] = (*layers.get(ref, ()), layer)


def _summed_bytes(graph: LayerGraph, layer: Layer, microbatches: int) -> int:
    """Counts what a step sums up or collects: gradients; with the loss, what a micro-batch yields."""
    trained = graph.trained(layer.reading(ValueKind.PARAMETER))
    total = sum(graph.parameters[p].array.bytes for p in trained)
    if layer.id == graph.loss_layer:
        losses = 1 + graph.weighted  # a weighted loss is a total and a weight
        aux_bytes = sum(array.bytes for array in graph.aux)
        total += microbatches * (losses * graph.loss_bytes + aux_bytes)
    return total


def _metric_bytes(graph: LayerGraph, microbatches: int) -> int:
    """Counts the results of a step: loss, weight, norm of the gradient, and aux values."""
    total = 3 * graph.loss_bytes
    for i, members in enumerate(graph.aux_groups):
        size = graph.aux[members[0]].bytes
        total += size if graph.aux_reduction(i) else microbatches * size
    return total


def holders_of(graph: LayerGraph, layer: int) -> tuple[int | None, ...]:
    """Names the holders of the optimizer's pieces and state that lie with a layer.

    None is the global program, which lies with the loss.
    """
    return (layer, None) if layer == graph.loss_layer else (layer,)


def _state_bytes(graph: LayerGraph, layer: int, optimizer: OptimizerCut | None) -> int:
    """Counts the optimizer's state beside a layer."""
    if optimizer is None:
        return 0
    return sum(_bytes_held(optimizer, holder) for holder in holders_of(graph, layer))


def _bytes_held(optimizer: OptimizerCut, holder: int | None) -> int:
    return sum(optimizer.state[i].array.bytes for i in optimizer.held_by(holder))


def _update_bytes(graph: LayerGraph, layer: int, optimizer: OptimizerCut | None) -> int:
    """Counts what an update needs beside a layer's own gradients, parameters and state.

    That is the gradients of other layers that read a tied parameter, and values that pieces
    exchange.
    """
    if optimizer is None:
        return 0
    total = 0
    for parameter in graph.tied():
        if parameter.owner == layer and not parameter.frozen:
            # The gradient of its own reader is counted with the layer already.
            others = len(parameter.readers) - 1
            total += others * parameter.array.bytes
    # Pieces share slots: each counts once.
    sizes: dict[Slot, int] = {}
    for piece in optimizer.update:
        if piece.layer not in holders_of(graph, layer):
            continue
        slots = (*piece.reads, *piece.writes)
        avals = (*piece.program.in_avals, *piece.program.out_avals)
        for slot, aval in zip(slots, avals, strict=True):
            sizes[slot] = aval.size * aval.dtype.itemsize
    exchanged = (size for slot, size in sizes.items() if slot.kind in _EXCHANGED)
    return total + sum(exchanged)
