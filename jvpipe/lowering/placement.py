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
        stage_of: dict[int, int] = {}
        for s, stage in enumerate(self.plan.stages):
            stage_of |= dict.fromkeys(stage.layers, s)
        return stage_of

    @cached_property
    def places(self) -> Mapping[int, tuple[int, ...]]:
        """The places of each layer: one, unless its stage is replicated."""
        return {layer: self.plan.stages[s].devices for layer, s in self.stage.items()}

    @cached_property
    def _slices(self) -> Sequence[tuple[Examples | None, ...]]:
        slices = []
        for replicas in self.plan.replicas:
            examples = self.graph.examples if replicas > 1 else 0  # a graph may have no batch
            slices.append(divided(examples, replicas))
        return slices

    def slices(self, layer: int) -> tuple[Examples | None, ...]:
        """Returns the examples that each replica of a layer's stage works on.

        (None,) where it is alone.
        """
        return self._slices[self.stage[layer]]

    @cached_property
    def home(self) -> int:
        """The place of what concerns all layers: that of the loss."""
        return self.places[self.graph.loss_layer][0]

    def of(self, layer: int, examples: Examples | None = None) -> int:
        """Returns the place of a layer, or of what belongs to none.

        Args:
            layer: or NONE.
            examples: those of the replica that is meant; the first one unless given.
        """
        if layer == NONE:
            return self.home
        replica = 0 if examples is None else self.slices(layer).index(examples)
        return self.places[layer][replica]

    def updating(self, optimizer: OptimizerCut) -> dict[int, int]:
        """Returns the place where each layer is updated, and what belongs to none."""
        places = {NONE: self.home}
        for layer, replica in updating(self.graph, self.plan, optimizer).items():
            places[layer] = self.places[layer][replica]
        return places

    def _of_all(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Returns the places of some layers, each once."""
        return tuple(dict.fromkeys(place for layer in layers for place in self.places[layer]))

    def holding(self, k: int) -> tuple[int, ...]:
        """Returns the places that hold a leaf of the model state: of its readers, else of its
        writers.
        """
        layers = self.graph.layers
        reading = [layer.id for layer in layers if k in layer.reading(ValueKind.STATE)]
        writing = [layer.id for layer in layers if k in layer.writing(ValueKind.STATE)]
        return self._of_all(reading or writing or [0])

    @cached_property
    def _away(self) -> frozenset[int]:
        return states_away(self.graph, self.plan)

    def resting(self, value: Value, optimizer: OptimizerCut) -> Copy:
        """Tells which copy of a value there is between updates: at its place, or on the host of its
        place.
        """
        if value.kind is not ValueKind.OPTIMIZER:
            return Copy.OWN
        parameter = optimizer.state[value.index].parameter
        return Copy.AWAY if parameter in self._away else Copy.OWN

    def lasting(self, optimizer: OptimizerCut) -> tuple[Buffer, ...]:
        """Lists what lies on the devices between steps.

        These are parameters (a copy per place that reads one), the optimizer's state (at the
        replica that updates the layer, or on its host), model state, constants. Optimizer state of
        no parameter (step counts) has a copy per layer, so that layers can move.
        """
        graph = self.graph
        buffers: list[Buffer] = []

        def add(
            value: Value,
            places: Iterable[int],
            size: int,
            copy: Copy = Copy.OWN,
        ) -> None:
            buffers.extend(Buffer(value, place, size, copy) for place in places)

        # A parameter has a copy wherever one of its readers runs.
        for p, parameter in enumerate(graph.parameters):
            reading = self._of_all(parameter.readers)
            add(graph.parameter(p, version=0), reading, parameter.array.bytes)
        # Optimizer state lies where the update runs, one copy of it.
        places = self.updating(optimizer)
        # The global program's state comes before all layers': their numbers are sorted.
        holders = [(j, NONE if layer is None else layer) for j, layer in optimizer.holders]
        for j, layer in sorted(holders):
            value = Value(ValueKind.OPTIMIZER, j, layer)
            copy = self.resting(value, optimizer)
            add(
                value,
                [places[layer]],
                optimizer.state[j].array.bytes,
                copy,
            )
        written = written_state(graph)
        for k, array in enumerate(graph.state):
            # State that is written counts micro-batches: between steps it is what the first finds.
            value = Value(ValueKind.STATE, k, microbatch=0 if k in written else NEVER)
            add(value, self.holding(k), array.bytes)
        for c, array in enumerate(graph.constants):
            constant = Value(ValueKind.CONSTANT, c)
            readers = [layer.id for layer in graph.layers if c in layer.reading(constant.kind)]
            add(constant, self._of_all(readers), array.bytes)
        return tuple(buffers)


def written_state(graph: LayerGraph) -> frozenset[int]:
    """Finds the leaves of the model state that some layer writes."""
    return frozenset(k for layer in graph.layers for k in layer.writing(ValueKind.STATE))
