"""The places of layers under a plan, and of what lies on the devices between steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jvpipe.ir.buffers import Buffer, Copy
from jvpipe.ir.examples import Examples, divided
from jvpipe.ir.fates import states_away
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import NEVER, NONE, Value, ValueKind
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.shares import updating


@dataclass(frozen=True)
class Placement:
    """The place of every layer of a graph under a plan; a stage that is replicated has several.

    >>> from jvpipe.ir.layers import Layer, Ref
    >>> layers = (Layer(0, "a", (), ()), Layer(1, "b", (), (Ref(ValueKind.LOSS, 0),)))
    >>> where = Placement(LayerGraph(layers, (), ()), Plan.from_cuts([1, 1], devices=[2, 0]))
    >>> where.of(0), where.of(NONE)
    (2, 0)
    """

    graph: LayerGraph
    plan: Plan

    @cached_property
    def stage(self) -> Mapping[int, int]:
        """The stage of each layer."""
        return {layer: s for s, stage in enumerate(self.plan.stages) for layer in stage.layers}

    @cached_property
    def places(self) -> Mapping[int, tuple[int, ...]]:
        """The places of each layer: one, unless its stage is replicated."""
        return {layer: self.plan.stages[s].devices for layer, s in self.stage.items()}

    @cached_property
    def _slices(self) -> Sequence[tuple[Examples | None, ...]]:
        return [divided(self.graph.examples if r > 1 else 0, r) for r in self.plan.replicas]

    def slices(self, layer: int) -> tuple[Examples | None, ...]:
        """The examples that each replica of a layer's stage works on; (None,) where it is alone."""
        return self._slices[self.stage[layer]]

    @cached_property
    def home(self) -> int:
        """The place of what concerns all layers: that of the loss."""
        return self.places[self.graph.loss_layer][0]

    def of(self, layer: int, examples: Examples | None = None) -> int:
        """The place of a layer, or of what belongs to none.

        Args:
            layer: or NONE.
            examples: those of the replica that is meant; the first one unless given.
        """
        if layer == NONE:
            return self.home
        return self.places[layer][0 if examples is None else self.slices(layer).index(examples)]

    def updating(self, optimizer: OptimizerCut) -> dict[int, int]:
        """The place where each layer is updated, and what belongs to none."""
        replicas = updating(self.graph, self.plan, optimizer)
        return {NONE: self.home} | {
            layer: self.places[layer][replica] for layer, replica in replicas.items()
        }

    def _of_all(self, layers: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(place for layer in layers for place in self.places[layer]))

    def holding(self, k: int) -> tuple[int, ...]:
        """The places that hold a leaf of the model state."""
        layers = self.graph.layers
        reading = [layer.id for layer in layers if k in layer.reading(ValueKind.STATE)]
        writing = [layer.id for layer in layers if k in layer.writing(ValueKind.STATE)]
        return self._of_all(reading or writing or [0])

    @cached_property
    def _away(self) -> frozenset[int]:
        return states_away(self.graph, self.plan)

    def resting(self, value: Value, optimizer: OptimizerCut) -> Copy:
        """The copy of a value that lies at its place, or on the host of that, between updates."""
        is_state = value.kind is ValueKind.OPTIMIZER
        swapped = is_state and optimizer.state[value.index].parameter in self._away
        return Copy.AWAY if swapped else Copy.OWN

    def lasting(self, optimizer: OptimizerCut) -> tuple[Buffer, ...]:
        """Lists what lies on the devices between steps: parameters (a copy per place that reads one), the optimizer's
        state (at the replica that updates the layer, or on its host), model state, constants. Optimizer state of no
        parameter (step counts) has a copy per layer, so that layers can move.
        """
        graph = self.graph
        buffers: list[Buffer] = []
        for p, parameter in enumerate(graph.parameters):
            value = graph.parameter(p, version=0)
            reading = self._of_all(parameter.readers)
            buffers += [Buffer(value, place, parameter.array.bytes) for place in reading]
        places = self.updating(optimizer)
        for j, layer in sorted(
            (j, NONE if layer is None else layer) for j, layer in optimizer.holders
        ):
            value, size = Value(ValueKind.OPTIMIZER, j, layer), optimizer.state[j].array.bytes
            copy = self.resting(value, optimizer)
            buffers.append(Buffer(value, places[layer], size, copy))
        written = written_state(graph)
        for k, array in enumerate(graph.state):
            value = Value(ValueKind.STATE, k, microbatch=0 if k in written else NEVER)
            buffers += [Buffer(value, place, array.bytes) for place in self.holding(k)]
        for c, array in enumerate(graph.constants):
            using = self._of_all(x.id for x in graph.layers if c in x.reading(ValueKind.CONSTANT))
            buffers += [Buffer(Value(ValueKind.CONSTANT, c), place, array.bytes) for place in using]
        return tuple(buffers)


def written_state(graph: LayerGraph) -> frozenset[int]:
    """The leaves of the model state that some layer writes."""
    return frozenset(k for layer in graph.layers for k in layer.writing(ValueKind.STATE))
