"""The fates of what forwards leave for backwards, and updates for updates, resolved from a plan's names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.plan import FATES, Fate, FateInfo, Plan
from jvpipe.util.names import did_you_mean

UPDATES_HELD = 2
"""The updates that a place has room for the state of, if it lies on the host: one runs, others come or leave."""
Edge = tuple[int, int]
"""A stage, and a tensor that it makes or reads."""


@dataclass(frozen=True, slots=True)
class Fates:
    """The fate of every candidate of every layer, and of every edge that a stage holds.

    `kept[layer]` are the candidates that the layer's forward saves, `swapped[layer]` those of them
    that go to the host in between. `recomputed` are layers whose forward runs once more before the
    backward of what reads their outputs. `away` are edges that go to the host in between, `dropped`
    those that their stage recomputes.
    """

    kept: tuple[frozenset[str], ...]
    swapped: tuple[frozenset[str], ...]
    recomputed: frozenset[int]
    away: frozenset[Edge]
    dropped: frozenset[Edge]

    @staticmethod
    def of(graph: LayerGraph, plan: Plan) -> "Fates":
        """Resolves a plan's fates.

        >>> from jvpipe.ir.layers import Array, Layer
        >>> from jvpipe.ir.plan import Fate, Stage
        >>> layer = Layer(0, "dense", (), (), (Array("product", (), "float32", 4),))
        >>> plan = Plan((Stage((0,), (0,), {"dense/product": Fate.SWAP}),))
        >>> Fates.of(LayerGraph((layer,), (), ()), plan).swapped
        (frozenset({'product'}),)

        Raises:
            ValueError: a fate for a name that the stage does not know, or a tensor to recompute
                that its stage does not make.
        """
        plan = _typed(plan)
        edges = _fates_of_edges(graph, plan)
        dropped = frozenset(edge for edge, fate in edges.items() if FATES[fate].again)
        recomputed = frozenset(graph.tensors[t].producer for _, t in dropped)
        fates = {layer: stage.fates for stage in plan.stages for layer in stage.layers}
        for layer in recomputed:  # what it leaves is recomputed with its outputs, and needs no fate
            fates[layer] = {}
        by_layer = [(layer, fates.get(layer.id, {})) for layer in graph.layers]
        return Fates(
            kept=tuple(left_by(graph, *pair, lambda info: info.saved) for pair in by_layer),
            swapped=tuple(left_by(graph, *pair, lambda info: info.away) for pair in by_layer),
            recomputed=recomputed,
            away=frozenset(edge for edge, fate in edges.items() if FATES[fate].away),
            dropped=dropped,
        )


def _typed(plan: Plan) -> Plan:
    """Returns a plan whose fates are `Fate`: users write them as text, too."""
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
    """Finds the candidates that a layer's forward leaves, of which a column of the table of fates is true.

    Args:
        graph: that has the layer.
        layer: whose candidates have fates.
        fates: by name; what is not named is kept.
        column: of the table.
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
        ValueError: a state fate whose name is not that of a parameter of a layer of its stage.

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
            if FATES[Fate(fate)].away:
                away.add(parameters[name])
    return frozenset(away)


def _fates_of_edges(graph: LayerGraph, plan: Plan) -> dict[Edge, Fate]:
    """Finds the edges that a plan names.

    Raises ValueError where it names what a stage does not know or make.
    """
    fates: dict[Edge, Fate] = {}
    for s, stage in enumerate(plan.stages):
        layers = [graph.layers[i] for i in stage.layers]
        candidates = [
            f"{graph.label(layer)}/{c.name}" for layer in layers for c in layer.candidates
        ]
        inside = set(stage.layers)
        tensors = {
            t.array.name: i
            for i, t in enumerate(graph.tensors)
            if inside & {t.producer, *t.readers}
        }
        for name, fate in stage.fates.items():
            if name in candidates:
                continue
            if name not in tensors:
                raise ValueError(
                    did_you_mean(f"tensor of stage {s}", name, [*candidates, *tensors])
                )
            producer = graph.tensors[tensors[name]].producer
            if FATES[fate].again and producer not in inside:
                raise ValueError(
                    f"stage {s} cannot recompute '{name}': it comes from layer {producer} of another stage"
                )
            fates[s, tensors[name]] = fate
    return fates
