"""The fates of a plan, resolved from names to layers and edges.

A fate says what happens to a value until it is read: it is kept, swapped to the host or recomputed.
Tensors have fates between forward and backward, and the optimizer's state has fates between
updates. A plan gives fates by name. Programs and passes look them up by layer and by edge.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.plan import FATES, Fate, FateInfo, Plan
from jvpipe.util.names import did_you_mean

UPDATES_HELD = 2
"""The largest number of updates whose swapped optimizer state is on a device at once.

With room for two, one update runs while the state of another is copied. With room for one, nothing
would overlap. Planners reserve this many times the bytes of the largest update's state, and
lowering/prefetch.py keeps within them.
"""
Edge = tuple[int, int]
"""A stage, and the index of a tensor that it makes or reads."""


@dataclass(frozen=True, slots=True)
class Fates:
    """The fates of all candidates, by layer, and of all edges, by stage.

    A candidate is a value inside a layer whose fate can be chosen. An edge is a tensor
    between layers; each stage that makes or reads the edge has a fate for it.

    Attributes:
        kept: for each layer, the candidates that its forward saves.
        swapped: for each layer, the kept candidates that go to the host until the backward.
        recomputed: the layers whose forwards run once more, before the first backward that
            reads what they yield.
        away: the edges that go to the host until the backward.
        dropped: the edges that are recomputed for the backward.
    """

    kept: tuple[frozenset[str], ...]
    swapped: tuple[frozenset[str], ...]
    recomputed: frozenset[int]
    away: frozenset[Edge]
    dropped: frozenset[Edge]

    @staticmethod
    def of(graph: LayerGraph, plan: Plan) -> "Fates":
        """Resolves a plan's fates from names to layers and edges.

        If `graph.whole_layers` is true, a layer with a candidate that is recomputed is
        recomputed as a whole.

        >>> from jvpipe.ir.layers import Array, Layer
        >>> from jvpipe.ir.plan import Fate, Stage
        >>> layer = Layer(0, "dense", (), (), (Array("product", (), "float32", 4),))
        >>> plan = Plan((Stage((0,), (0,), {"dense/product": Fate.SWAP}),))
        >>> Fates.of(LayerGraph((layer,), (), ()), plan).swapped
        (frozenset({'product'}),)

        Raises:
            ValueError: a stage has a fate for an unknown name, or has the fate `recompute` for a
                tensor that another stage makes.
        """
        plan = _typed(plan)
        edges = _fates_of_edges(graph, plan)
        # The fate of an edge also decides about the layer that makes the edge:
        #
        #     edge "again" on stage s   ->   its producer runs its forward once more
        #                               ->   all that the producer keeps inside is made then, too
        dropped = frozenset(edge for edge, fate in edges.items() if FATES[fate].again)
        recomputed = frozenset(graph.tensors[t].producer for _, t in dropped)
        fates = {layer: stage.fates for stage in plan.stages for layer in stage.layers}
        if graph.whole_layers:
            # Without a part that is recomputed inside its backward, a layer has only one backward
            # program, whatever its fates.
            recomputed |= {
                layer.id
                for layer in graph.layers
                if left_by(graph, layer, fates.get(layer.id, {}), lambda info: not info.saved)
            }
        for layer in recomputed:  # the repeated forward yields all residuals, so none needs a fate
            fates[layer] = {}
        kept, swapped = [], []
        for layer in graph.layers:
            fates_inside = fates.get(layer.id, {})
            kept.append(left_by(graph, layer, fates_inside, lambda info: info.saved))
            swapped.append(left_by(graph, layer, fates_inside, lambda info: info.away))
        away = frozenset(edge for edge, fate in edges.items() if FATES[fate].away)
        return Fates(
            kept=tuple(kept),
            swapped=tuple(swapped),
            recomputed=recomputed,
            away=away,
            dropped=dropped,
        )


def _typed(plan: Plan) -> Plan:
    """Returns a plan whose fates are of type `Fate`; users may write them as text."""
    stages = []
    for stage in plan.stages:
        fates = {name: Fate(fate) for name, fate in stage.fates.items()}
        stages.append(replace(stage, fates=fates))
    return replace(plan, stages=tuple(stages))


def left_by(
    graph: LayerGraph,
    layer: Layer,
    fates: Mapping[str, Fate],
    column: Callable[[FateInfo], bool],
) -> frozenset[str]:
    """Finds the candidates of a layer whose fate has a property, such as being saved.

    Args:
        graph: the graph that has the layer.
        layer: the layer.
        fates: the fates by name; a candidate without a fate is kept.
        column: reads the property from a line of the table `FATES`.
    """
    label = graph.label(layer)
    left: set[str] = set()
    for candidate in layer.candidates:
        fate = fates.get(f"{label}/{candidate.name}", Fate.KEEP)
        if column(FATES[fate]):
            left.add(candidate.name)
    return frozenset(left)


def states_away(graph: LayerGraph, plan: Plan) -> frozenset[int]:
    """Finds the parameters whose optimizer state lies on the host between updates.

    Raises:
        ValueError: a stage has a state fate for a parameter that it does not own.

    >>> from jvpipe.ir.layers import Array, Layer, Parameter
    >>> from jvpipe.ir.plan import Fate, Stage
    >>> graph = LayerGraph((Layer(0, "a", (), ()),), (), (Parameter(Array("w", (), "float32", 4), (0,)),))
    >>> states_away(graph, Plan((Stage((0,), (0,), state_fates={"w": Fate.SWAP}),)))
    frozenset({0})
    """
    away: set[int] = set()
    for s, stage in enumerate(plan.stages):
        owned = [p for layer in stage.layers for p in graph.owned(layer)]
        parameters = {graph.parameters[p].array.name: p for p in owned}
        for name, fate in stage.state_fates.items():
            if name not in parameters:
                raise ValueError(did_you_mean(f"parameter of stage {s}", name, list(parameters)))
            if FATES[fate].away:
                away.add(parameters[name])
    return frozenset(away)


def _fates_of_edges(graph: LayerGraph, plan: Plan) -> dict[Edge, Fate]:
    """Finds the fates of the edges that a plan names; names of candidates are skipped.

    Raises ValueError as described in `Fates.of`.
    """
    fates: dict[Edge, Fate] = {}
    for s, stage in enumerate(plan.stages):
        layers = [graph.layers[i] for i in stage.layers]
        candidates: list[str] = []
        for layer in layers:
            label = graph.label(layer)
            candidates += [f"{label}/{candidate.name}" for candidate in layer.candidates]
        inside = set(stage.layers)
        tensors: dict[str, int] = {}
        for i, tensor in enumerate(graph.tensors):
            if inside & {tensor.producer, *tensor.readers}:
                tensors[tensor.array.name] = i
        for name, fate in stage.fates.items():
            if name in candidates:
                continue
            if name not in tensors:
                names = [*candidates, *tensors]
                raise ValueError(did_you_mean(f"tensor of stage {s}", name, names))
            producer = graph.tensors[tensors[name]].producer
            # To recompute a value, the stage must run the layer that makes it.
            if FATES[fate].again and producer not in inside:
                raise ValueError(
                    f"stage {s} cannot recompute '{name}', because layer {producer} of another "
                    "stage makes it: use 'keep' or 'swap'"
                )
            fates[s, tensors[name]] = fate
    return fates
