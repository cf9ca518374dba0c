"""The layout of a micro-batch: its plan, the fates of its tensors, and the programs of its layers.

A fate says whether a tensor is kept, swapped to the host or recomputed between the forward that
makes it and the backward that reads it. The programs depend on the fates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import assert_never

from jvpipe.ir.examples import Examples
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import Value, ValueKind


@dataclass(frozen=True)
class SliceLayout:
    """The signatures of the programs that run on one slice of a micro-batch, by layer."""

    signatures: Mapping[int, Signature]
    halves: Mapping[int, SplitSignature]


@dataclass(frozen=True)
class MicrobatchLayout:
    """The plan, fates and programs of a micro-batch.

    `number` identifies the layout in its step. `signatures` say what each layer's programs take and
    yield. `halves` has the signatures of backwards that are split in two. `sliced` has the
    signatures of the programs that replicas run on their slices.
    """

    number: int
    graph: LayerGraph
    plan: Plan
    fates: Fates
    signatures: Sequence[Signature]  # by layer
    halves: Mapping[int, SplitSignature] = field(default_factory=dict)  # by layer
    sliced: Mapping[Examples, SliceLayout] = field(default_factory=dict)  # by slice

    @staticmethod
    def of(
        graph: LayerGraph,
        plan: Plan,
        signatures: Sequence[Signature],
        number: int = 0,
    ) -> "MicrobatchLayout":
        """Makes the layout of a plan.

        Args:
            graph: the layers.
            plan: the stages of the layers, and the fates.
            signatures: what each layer's programs take and yield; they depend on the fates.
            number: the layout's number among those of its step.

        >>> from jvpipe.ir.layers import Array
        >>> from jvpipe.ir.plan import Fate, Stage
        >>> product = Array("product", (), "float32", 4)
        >>> graph = LayerGraph((Layer(0, "dense", (), (), (product,)),), (), ())
        >>> signature = Signature((product,), (("residual", 0),), (), (), (), ())
        >>> plan = Plan((Stage((0,), (0,), {"dense/product": Fate.SWAP}),))
        >>> [str(value) for value in MicrobatchLayout.of(graph, plan, [signature]).swapped(0, 5)]
        ['residual 0 layer 0 micro-batch 5']
        """
        return MicrobatchLayout(number, graph, plan, Fates.of(graph, plan), signatures)

    @cached_property
    def stage(self) -> Mapping[int, int]:
        """The stage of each layer."""
        return stages_of(self.plan)

    def layers(self, stage: int) -> list[Layer]:
        """Returns the layers of a stage, in the order of their forwards."""
        return [self.graph.layers[i] for i in self.plan.stages[stage].layers]

    def drops(self, layer: Layer, ref: Ref) -> bool:
        """Tells whether a layer's stage drops an edge after the forward and recomputes it later.

        Args:
            layer: the layer.
            ref: an input or output of the layer; only edges are ever dropped.
        """
        edge = self.stage[layer.id], ref.index
        return ref.kind is ValueKind.TENSOR and edge in self.fates.dropped

    def swapped(self, stage: int, m: int) -> list[Value]:
        """Lists the residuals and edges that go to the host after a stage's forward.

        A residual is a value that a forward leaves for its own backward. An edge is a tensor
        between layers. An edge with the fate `swap` goes only if a backward of the stage reads it,
        and if no other stage on the same devices makes or reads it.

        Args:
            stage: the stage whose forward has run.
            m: the micro-batch.
        """
        layers = self.layers(stage)
        values: list[Value] = []
        read: set[Ref] = set()
        for layer in layers:
            signature = self.signatures[layer.id]
            swapped = self.fates.swapped[layer.id]
            read.update(_edges_read(layer, signature))
            for i, array in enumerate(signature.residuals):
                if array.name in swapped:
                    values.append(
                        Value(
                            ValueKind.RESIDUAL,
                            i,
                            layer.id,
                            m,
                        )
                    )
        # Stages on the same devices share an edge's buffer. The buffer stays if two of these stages
        # use it.
        for s, t in sorted(self.fates.away):
            is_read = Ref(ValueKind.TENSOR, t) in read
            if s == stage and is_read and self._stages_at(stage, t) == {stage}:
                values.append(Value(ValueKind.TENSOR, t, microbatch=m))
        return values

    def _stages_at(self, stage: int, t: int) -> set[int]:
        """Finds the stages on the same devices as a given stage that make or read an edge."""
        tensor = self.graph.tensors[t]
        stages = self.plan.stages
        devices = stages[stage].devices
        touching = {self.stage[layer] for layer in (tensor.producer, *tensor.readers)}
        return {s for s in touching if stages[s].devices == devices}


def stages_of(plan: Plan) -> dict[int, int]:
    """Returns the stage of each layer under a plan."""
    return {layer: s for s, stage in enumerate(plan.stages) for layer in stage.layers}


def _edges_read(layer: Layer, signature: Signature) -> Iterator[Ref]:
    """Yields the inputs and outputs of a layer that its backward reads."""
    for kind, i in signature.sources:
        match kind:
            case "input":
                yield layer.reads[i]
            case "output":
                yield layer.writes[i]
            case "residual":
                pass
            case _:
                assert_never(kind)
