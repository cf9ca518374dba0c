"""A traced model as planners see it: seconds and bytes of its layers, and the values between them.

The bytes follow the rules by which buffers are made when a step is lowered. So if the temporary
bytes of the programs are right, a planner never counts fewer bytes for a stage than the stage
will hold. The rules distinguish two sorts of values.

A value that some backward reads is held: it exists until that backward, once for each
micro-batch in flight. The layers whose backwards read the value are its holders. Every other
value passes: it exists only from the first to the last forward that makes or reads it, and
counts as a temporary of all layers from the first to the last.

    layers of a stage     0   1   2   3
    a value               w---r-------r      w: layer 0's forward makes the value
                                             r: the forwards of layers 1 and 3 read it
    which backwards       holders            how the value counts
    read the value
      layer 1's           (1,)               held by layer 1 alone, as one of its own inputs
      layers 1's and 3's  (1, 3)             shared: a stage with both layers holds it once
      none                none               passes: a temporary of the forwards of layers 0 to 3
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared, SplitCost
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature
from jvpipe.ir.outline import outline_of
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Piece, Slot, SlotKind

_EXCHANGED = (SlotKind.WEIGHT, SlotKind.KEPT, SlotKind.PARTIAL, SlotKind.GLOBAL)
"""The kinds of slots (arrays) that pieces of an update exchange with each other.

Slots of other kinds hold gradients, their norm, parameters and state, which count elsewhere.
"""
_LASTING = (ValueKind.STATE, ValueKind.CONSTANT)
"""The kinds of values that a stage has between steps, too."""
_PASSING = (ValueKind.BATCH, ValueKind.SEED, ValueKind.STATE, ValueKind.TENSOR)
"""The kinds of values that can pass."""


@dataclass(frozen=True, slots=True)
class Work:
    """The seconds and bytes of a layer's programs on one micro-batch, and of its update.

    The programs keep all candidates, which are the values whose fates a planner can choose.
    Temporary bytes are what a program needs besides its inputs and results.
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
        works: the work of each layer.
        loss: the layer of the loss, with which the optimizer's global program runs.
        optimizer: the optimizer, cut into pieces that run with a layer or with the loss.
        seconds: a function that returns the seconds of a piece.
    """
    works = list(works)
    for piece in optimizer.update:
        layer = loss if piece.layer is None else piece.layer
        works[layer] = replace(works[layer], update_s=works[layer].update_s + seconds(piece))
    return works


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
        graph: the layers, tensors and parameters of the model.
        signatures: by layer, the interface of the programs that keep all candidates.
        works: by layer, its seconds and temporary bytes.
        options: by layer, its options, the first of which keeps everything; None if no
            layer has any other option.
        optimizer: the optimizer whose state and update count; None if neither counts.
        microbatches: micro-batches of a step, whose losses and aux values are held until
            its end.
        splits: by layer, the costs of its backward in halves; None if all backwards run whole.
    """
    model = _Model(graph, signatures)
    if options is None:
        residuals_bytes = (sum(array.bytes for array in s.residuals) for s in signatures)
        options = [[Option(kept_bytes)] for kept_bytes in residuals_bytes]
    splits = splits or [None] * len(works)
    layers = []
    for layer, work, of_layer, split in zip(graph.layers, works, options, splits, strict=True):
        cost = _layer_cost(model, layer, work, optimizer, microbatches)
        layers.append(replace(cost, options=tuple(of_layer), split=split))
    edges = [
        Edge(t.producer, t.readers, t.array.bytes, t.array.name, t.differentiable)
        for t in graph.tensors
    ]
    return Costs(
        tuple(layers),
        tuple(edges),
        tuple(model.shared()),
        ids=tuple(layer.id for layer in graph.layers),
        carried=carried(graph),
        outline=outline_of(graph, microbatches),
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
        model: the model that has the layer.
        layer: the layer.
        work: the seconds and temporary bytes of the layer's programs.
        optimizer: the optimizer whose state and update count; None if neither counts.
        microbatches: micro-batches of a step.
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
        optimizer_bytes=lasting_bytes + _state_bytes(optimizer, holders_of(graph, layer.id)),
        input_bytes=sum(tensor.array.bytes for tensor in own_tensors),
        # Programs of a device run one after another, so only the largest temporaries count.
        temporary_bytes=max(forward_bytes, backward_bytes, update_bytes, ending_bytes),
        state_bytes=_state_bytes(optimizer, [layer.id]),
        update_s=work.update_s,
    )


def carried(graph: LayerGraph) -> tuple[tuple[int, ...], ...]:
    """Finds, for each leaf of the model state, the group of layers that it ties together.

    A group goes from the first to the last layer that reads or writes the leaf. Leaves that no
    layer writes, or that only one layer uses, have no group.

    Each micro-batch reads the leaf that the micro-batch before it has written. Suppose that
    a group begins in one stage of a device and ends in another one. Before each
    micro-batch, the earlier stage would wait for the later stage. Therefore no device may
    have a group in two stages.
    """
    groups = []
    for leaf in range(len(graph.state)):
        readers = [layer.id for layer in graph.layers if leaf in layer.reading(ValueKind.STATE)]
        writers = [layer.id for layer in graph.layers if leaf in layer.writing(ValueKind.STATE)]
        touching = readers + writers
        if writers and min(touching) < max(touching):
            groups.append(tuple(range(min(touching), max(touching) + 1)))
    return tuple(groups)


def split_costs(
    graph: LayerGraph,
    programs: Sequence[LayerPrograms],
    seconds: Callable[[LayerPrograms], Sequence[float]],
) -> list[SplitCost | None]:
    """Returns the costs of each layer's backward in halves; None if a backward has no halves.

    Args:
        graph: the layers.
        programs: by layer, the programs that keep all candidates; equal layers share an object.
        seconds: a function that returns the seconds of both halves. It is called once per object.
    """
    halves_s = cache(seconds)
    pairs = zip(graph.layers, programs, strict=True)
    return [one.halves and _split_cost(graph, layer, one, *halves_s(one)) for layer, one in pairs]


def _split_cost(
    graph: LayerGraph,
    layer: Layer,
    programs: LayerPrograms,
    input_s: float,
    weight_s: float,
) -> SplitCost:
    """Returns the cost of a backward in halves, with the bytes that are held between the halves."""
    assert programs.halves is not None
    split = programs.halves.signature
    values = {"input": layer.reads, "output": layer.writes}
    kept_bytes = 0
    # A cotangent is as large as its output, so the output's bytes are counted for it.
    read = [layer.writes[i] for i in split.weight.cotangents]
    for kind, i in split.weight.sources:
        if kind == "residual":
            kept_bytes += split.weight.residuals[i].bytes
        else:
            read.append(values[kind][i])
    tensors = (graph.tensors[ref.index] for ref in read if ref.kind == ValueKind.TENSOR)
    kept_bytes += sum(tensor.array.bytes for tensor in tensors)
    return SplitCost(input_s, weight_s, sum(a.bytes for a in split.handed), kept_bytes)


def own_inputs(graph: LayerGraph, signatures: Sequence[Signature]) -> list[list[int]]:
    """Returns for each layer the input tensors that only this layer's backward reads."""
    model = _Model(graph, signatures)
    return [model.own_inputs(layer) for layer in graph.layers]


class _Model:
    """The values of a model: their bytes, and the layers that read or make them.

    Attributes:
        holders: by value, the layers whose backward reads it, or whose forward may read it
            again for the backward, in ascending order.
        touching: by value, the layers whose forward reads or makes it, in ascending order.
        bytes: by value, its bytes; parameters and aux values are not in it.
    """

    def __init__(self, graph: LayerGraph, signatures: Sequence[Signature]) -> None:
        self.graph = graph
        self.holders: dict[Ref, tuple[int, ...]] = {}
        self.touching: dict[Ref, tuple[int, ...]] = {}
        for layer, signature in zip(graph.layers, signatures, strict=True):
            values = {"input": layer.reads, "output": layer.writes}
            left = {values[kind][i] for kind, i in signature.sources if kind != "residual"}
            if graph.whole_layers:
                # The layer may run again, and then reads all its inputs before its backward.
                left.update(ref for ref in layer.reads if ref.kind in _PASSING)
            for ref in left:
                self.holders[ref] = (*self.holders.get(ref, ()), layer.id)
            for ref in {*layer.reads, *layer.writes}:
                self.touching[ref] = (*self.touching.get(ref, ()), layer.id)
        sizes = {
            ValueKind.TENSOR: [tensor.array.bytes for tensor in graph.tensors],
            ValueKind.BATCH: [array.bytes for array in graph.batch],
            ValueKind.SEED: [graph.seed_bytes],
            ValueKind.STATE: [array.bytes for array in graph.state],
            ValueKind.CONSTANT: [array.bytes for array in graph.constants],
        }
        self.bytes: dict[Ref, int] = {}
        for kind, of_kind in sizes.items():
            self.bytes |= {Ref(kind, i): size for i, size in enumerate(of_kind)}

    def own_inputs(self, layer: Layer) -> list[int]:
        """Returns the input tensors of a layer that only the layer's own backward reads."""
        read = layer.reading(ValueKind.TENSOR)
        return [t for t in read if self.holders.get(Ref(ValueKind.TENSOR, t)) == (layer.id,)]

    def shared(self) -> Iterator[Shared]:
        """Yields the values that a stage holds once, however many of its layers read them."""
        own = [self.own_inputs(layer) for layer in self.graph.layers]
        counted = {Ref(ValueKind.TENSOR, t) for t in chain.from_iterable(own)}
        for ref, size in self.bytes.items():
            touching = self.touching.get(ref, ())
            if ref.kind in _LASTING and len(touching) > 1:
                yield Shared(touching, size, per_version=True)
            # A layer's own inputs and captured arrays count elsewhere.
            if ref in self.holders and ref.kind != ValueKind.CONSTANT and ref not in counted:
                yield Shared(self.holders[ref], size)
        for parameter in self.graph.tied():
            yield Shared(parameter.readers, parameter.array.bytes, per_version=True)

    def lasting_bytes(self, layer: int) -> int:
        """Counts model state, captured arrays and frozen parameters that no other layer touches."""
        frozen = [p for p in self.graph.parameters if p.frozen and p.readers == (layer,)]
        # A value that no layer reads or makes counts for the first layer.
        lasting = (
            size
            for ref, size in self.bytes.items()
            if ref.kind in _LASTING and self.touching.get(ref, (0,)) == (layer,)
        )
        return sum(p.array.bytes for p in frozen) + sum(lasting)

    def passing_forward_bytes(self, layer: Layer) -> int:
        """Counts the bytes that are alive while a layer's forward runs, and are not held.

        They are tensors that no backward reads; aux values that the layer makes; and leaves of the
        batch, seeds and leaves of the state, unless this layer's own backward reads them.
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
        """Counts the bytes of the cotangents that are alive while a layer's backward runs."""
        # A tensor's cotangent is alive from the last reader's backward to the producer's.
        tensors = (tensor for tensor in self.graph.tensors if tensor.differentiable)
        return sum(t.array.bytes for t in tensors if t.producer <= layer.id <= t.readers[-1])


def _summed_bytes(graph: LayerGraph, layer: Layer, microbatches: int) -> int:
    """Counts the bytes of a layer's gradients, which a step sums up.

    The layer of the loss also has the losses and aux values of all micro-batches.
    """
    trained = graph.trained(layer.reading(ValueKind.PARAMETER))
    total = sum(graph.parameters[p].array.bytes for p in trained)
    if layer.id == graph.loss_layer:
        losses = 1 + graph.weighted  # a weighted loss is a total and a weight
        aux_bytes = sum(array.bytes for array in graph.aux)
        total += microbatches * (losses * graph.loss_bytes + aux_bytes)
    return total


def _metric_bytes(graph: LayerGraph, microbatches: int) -> int:
    """Counts the bytes of a step's results: loss, weight, norm of the gradient, and aux values."""
    total = 3 * graph.loss_bytes
    for i, members in enumerate(graph.aux_groups):
        size = graph.aux[members[0]].bytes
        total += size if graph.aux_reduction(i) else microbatches * size
    return total


def holders_of(graph: LayerGraph, layer: int) -> tuple[int | None, ...]:
    """Returns the keys under which `OptimizerCut` lists a layer's pieces and optimizer state.

    One key is the layer itself. The layer of the loss has a second key, None, which stands
    for the optimizer's global program. These keys have nothing to do with `_Model.holders`.
    """
    return (layer, None) if layer == graph.loss_layer else (layer,)


def _state_bytes(optimizer: OptimizerCut | None, holders: Sequence[int | None]) -> int:
    """Counts the bytes of the optimizer's state that belongs to any of several holders."""
    if optimizer is None:
        return 0
    leaves = (leaf for leaf, holder in optimizer.holders if holder in holders)
    return sum(optimizer.state[leaf].array.bytes for leaf in leaves)


def _update_bytes(graph: LayerGraph, layer: int, optimizer: OptimizerCut | None) -> int:
    """Counts the bytes that an update needs besides a layer's gradients, parameters and state.

    These are the values that pieces of the optimizer exchange and, for the owner of a tied
    parameter, the parameter's gradients from the other layers that read it.
    """
    if optimizer is None:
        return 0
    # The owner's own gradient of the parameter counts among the layer's gradients.
    others_bytes = (
        (len(parameter.readers) - 1) * parameter.array.bytes
        for parameter in graph.tied()
        if parameter.owner == layer and not parameter.frozen
    )
    # Pieces share slots, and each slot counts once.
    sizes: dict[Slot, int] = {}
    for piece in optimizer.update:
        if piece.layer in holders_of(graph, layer):
            slots = (*piece.reads, *piece.writes)
            avals = (*piece.program.in_avals, *piece.program.out_avals)
            for slot, aval in zip(slots, avals, strict=True):
                sizes[slot] = aval.size * aval.dtype.itemsize
    exchanged = (size for slot, size in sizes.items() if slot.kind in _EXCHANGED)
    return sum(others_bytes) + sum(exchanged)
