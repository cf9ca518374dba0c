"""The places of layers under a plan, and of the values that exist between steps.

A place is the number of a device, or of a mesh of devices. `Placement.lasting` decides where values
are between steps. So it also decides what a change of plan moves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jvpipe.ir.buffers import Buffer, Copy
from jvpipe.ir.examples import Examples, divided
from jvpipe.ir.fates import states_away
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import NEVER, NONE, Value, ValueKind
from jvpipe.lowering.layout import stages_of
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.shares import updating


@dataclass(frozen=True)
class Placement:
    """The places of each layer of a graph under a plan: several if the layer's stage has replicas.

    `optimizer` says which layer each part of its state belongs to.

    >>> import jax
    >>> from jvpipe.ir.layers import Layer, Ref
    >>> layers = (Layer(0, "a", (), ()), Layer(1, "b", (), (Ref(ValueKind.LOSS, 0),)))
    >>> optimizer = OptimizerCut((), (), (), jax.tree.structure(None), ())
    >>> where = Placement(LayerGraph(layers, (), ()), Plan.from_cuts([1, 1], devices=[2, 0]), optimizer)
    >>> where.of(0), where.of(NONE)
    (2, 0)
    """

    graph: LayerGraph
    plan: Plan
    optimizer: OptimizerCut

    @cached_property
    def stage(self) -> Mapping[int, int]:
        """The stage of each layer."""
        return stages_of(self.plan)

    @cached_property
    def places(self) -> Mapping[int, tuple[int, ...]]:
        """The places of each layer: one, or one per replica of its stage."""
        return {layer: self.plan.stages[s].devices for layer, s in self.stage.items()}

    @cached_property
    def _slices(self) -> Sequence[tuple[Examples | None, ...]]:
        """The examples of each replica, by stage."""
        slices = []
        for replicas in self.plan.replicas:
            examples = self.graph.examples if replicas > 1 else 0  # a graph may have no batch
            slices.append(divided(examples, replicas))
        return slices

    def slices(self, layer: int) -> tuple[Examples | None, ...]:
        """Returns the examples that each replica of a layer's stage works on.

        If the stage runs at one place, the result is (None,), which stands for all examples.
        """
        return self._slices[self.stage[layer]]

    @cached_property
    def home(self) -> int:
        """The place of operations that belong to no single layer: the first place of the loss."""
        return self.places[self.graph.loss_layer][0]

    def of(self, layer: int, examples: Examples | None = None) -> int:
        """Returns the place of a layer, or of operations that belong to no layer.

        Args:
            layer: the layer, or NONE.
            examples: the slice of the replica that is meant; by default, that of the first replica.
        """
        if layer == NONE:
            return self.home
        replica = 0 if examples is None else self.slices(layer).index(examples)
        return self.places[layer][replica]

    @cached_property
    def updating_replica(self) -> Mapping[int, int]:
        """The number of the replica that updates each layer."""
        return updating(self.graph, self.plan, self.optimizer)

    def updated_at(self, layer: int) -> int:
        """Returns the place of a layer's update or, for NONE, the place of the global program.

        The global program is the part of the optimizer that mixes layers, such as a gradient norm.
        """
        if layer == NONE:
            return self.home
        replica = self.updating_replica[layer]
        return self.places[layer][replica]

    def _of_all(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Returns the places of some layers, each once."""
        places: dict[int, None] = {}
        for layer in layers:
            places |= dict.fromkeys(self.places[layer])
        return tuple(places)

    def holding(self, k: int) -> tuple[int, ...]:
        """Returns the places that hold a leaf of the model state."""
        return self._of_all(state_layers(self.graph, k))

    @cached_property
    def _away(self) -> frozenset[int]:
        return states_away(self.graph, self.plan)

    def resting(self, value: Value) -> Copy:
        """Tells where a value lies between updates: at its place (OWN), or on the host (AWAY)."""
        if value.kind is not ValueKind.OPTIMIZER:
            return Copy.OWN
        parameter = self.optimizer.state[value.index].parameter
        return Copy.AWAY if parameter in self._away else Copy.OWN

    @cached_property
    def lasting(self) -> tuple[Buffer, ...]:
        """The buffers that exist between steps. They hold:

            parameters       a copy at each place that has a reader
            optimizer state  at the replica that updates the layer, or on that replica's host
            model state      a copy at each place that `holding` returns
            constants        a copy at each place that has a reader

        Optimizer state that belongs to no parameter, such as a count of steps, has a copy for each
        layer, so that a layer can move with its own copy. A step begins with these buffers, in this
        order. A state has its arrays in the same order.
        """
        graph, optimizer = self.graph, self.optimizer
        buffers: list[Buffer] = []

        def add(
            value: Value,
            places: Iterable[int],
            size: int,
            copy: Copy = Copy.OWN,
        ) -> None:
            """Adds a buffer of a value for each of some places.

            Args:
                value: what the buffers hold.
                places: the indices of the places.
                size: the bytes of each buffer.
                copy: OWN for a buffer at the place itself, AWAY for one on the place's host.
            """
            buffers.extend(Buffer(value, place, size, copy) for place in places)

        # A parameter has a copy wherever one of its readers runs.
        for p, parameter in enumerate(graph.parameters):
            reading = self._of_all(parameter.readers)
            add(graph.parameter(p, version=0), reading, parameter.array.bytes)
        # Each layer that holds a leaf of optimizer state has one copy of it, at the place where the
        # layer is updated. For each leaf, sorting puts the copy of the global program (layer NONE,
        # -1) before those of the layers.
        holders = [(j, NONE if layer is None else layer) for j, layer in optimizer.holders]
        for j, layer in sorted(holders):
            value = Value(ValueKind.OPTIMIZER, j, layer)
            size = optimizer.state[j].array.bytes
            add(value, [self.updated_at(layer)], size, self.resting(value))
        written = written_state(graph)
        for k, array in enumerate(graph.state):
            # State that layers write is named by the micro-batch that will read it: between steps,
            # by the first micro-batch of the next step.
            value = Value(ValueKind.STATE, k, microbatch=0 if k in written else NEVER)
            add(value, self.holding(k), array.bytes)
        for c, array in enumerate(graph.constants):
            constant = Value(ValueKind.CONSTANT, c)
            readers = [layer.id for layer in graph.layers if c in layer.reading(constant.kind)]
            add(constant, self._of_all(readers), array.bytes)
        return tuple(buffers)


def state_layers(graph: LayerGraph, k: int) -> Sequence[int]:
    """Returns the layers at whose places a leaf of the model state lies.

    They are the layers that read the leaf. If no layer reads it, they are the layers that write it.
    If no layer writes it either, the result is layer 0.

    Args:
        graph: the layers.
        k: the number of the leaf.
    """
    reading = [layer.id for layer in graph.layers if k in layer.reading(ValueKind.STATE)]
    writing = [layer.id for layer in graph.layers if k in layer.writing(ValueKind.STATE)]
    return reading or writing or [0]


def written_state(graph: LayerGraph) -> frozenset[int]:
    """Finds the leaves of the model state that some layer writes."""
    return frozenset(k for layer in graph.layers for k in layer.writing(ValueKind.STATE))
