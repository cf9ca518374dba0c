"""The fates of the values that a forward leaves for its backward, resolved from a plan's names."""

from collections.abc import Mapping
from dataclasses import dataclass

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.names import did_you_mean
from jvpipe.ir.plan import FATES, Fate, Plan


@dataclass(frozen=True, slots=True)
class Fates:
    """The fate of every candidate of every layer, and of every edge that a stage holds.

    `kept[layer]` are the candidates that the layer's forward saves, `swapped[layer]` those of them that go to the
    host in between. `recomputed` are layers whose forward runs once more before the backward of what reads their
    outputs.
    `edges[stage, tensor]` are those that are swapped or recomputed; all others are kept.
    """

    kept: tuple[frozenset[str], ...]
    swapped: tuple[frozenset[str], ...]
    recomputed: frozenset[int]
    edges: Mapping[tuple[int, int], Fate]

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
            ValueError: a fate for a name that the stage does not know, or a tensor to recompute that its stage
                does not make.
        """
        kept = [frozenset(c.name for c in layer.candidates) for layer in graph.layers]
        swapped: list[frozenset[str]] = [frozenset()] * len(kept)
        edges: dict[tuple[int, int], Fate] = {}
        for s, stage in enumerate(plan.stages):
            inside = set(stage.layers)
            candidates = {
                f"{graph.label(layer)}/{c.name}": (layer.id, c.name)
                for layer in (graph.layers[i] for i in stage.layers)
                for c in layer.candidates
            }
            tensors = {
                t.array.name: i
                for i, t in enumerate(graph.tensors)
                if inside & {t.producer, *t.readers}
            }
            for name, fate in ((name, Fate(fate)) for name, fate in stage.fates.items()):
                if name in candidates:
                    layer, candidate = candidates[name]
                    if FATES[fate].away:
                        swapped[layer] |= {candidate}
                    if not FATES[fate].saved:
                        kept[layer] -= {candidate}
                elif name in tensors:
                    producer = graph.tensors[tensors[name]].producer
                    if FATES[fate].again and producer not in inside:
                        raise ValueError(
                            f"stage {s} cannot recompute '{name}': it comes from layer {producer} of another stage"
                        )
                    if fate is not Fate.KEEP:
                        edges[s, tensors[name]] = fate
                else:
                    raise ValueError(
                        did_you_mean(f"tensor of stage {s}", name, [*candidates, *tensors])
                    )
        recomputed = frozenset(
            graph.tensors[t].producer for (_, t), fate in edges.items() if FATES[fate].again
        )
        for layer in recomputed:  # what a layer leaves is recomputed with its outputs
            kept[layer] = frozenset(c.name for c in graph.layers[layer].candidates)
            swapped[layer] = frozenset()
        return Fates(tuple(kept), tuple(swapped), recomputed, edges)
