"""The costs of a model, layer by layer: the numbers that planners and the simulator read.

All numbers are for one device. The numbers of a forward or backward are for one micro-batch. They
are measured (`measure.py`), estimated from the jaxpr (`estimate.py`), or read from a profile that
others have measured (`profiles/`). Bytes "per micro-batch in flight" count once for each
micro-batch whose forward on the stage has begun and whose backward has not ended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Fate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """A way to treat the values that a layer's forward leaves for its backward.

    Each of these values has a fate: it is kept, swapped to the host, or recomputed.

    Attributes:
        kept_bytes: bytes that stay on the device, per micro-batch in flight.
        swapped_bytes: bytes that go to the host, per micro-batch in flight.
        extra_s: seconds by which the backward takes longer, because it recomputes values.
        extra_bytes: additional bytes that the backward needs while it runs.
        fates: by name, the fate of each value that is not kept.
        swaps_input: whether the layer's own inputs (`LayerCost.input_bytes`) are swapped, too.
    """

    kept_bytes: int
    swapped_bytes: int = 0
    extra_s: float = 0.0
    extra_bytes: int = 0
    fates: Mapping[str, Fate] = field(default_factory=dict)
    swaps_input: bool = False


@dataclass(frozen=True, slots=True)
class SplitCost:
    """The cost of a backward in two halves: their seconds, and the bytes held between them.

    The first half yields the cotangents of the layer's inputs, for which the stage before waits.
    The second half yields the gradients of the layer's parameters, which can wait.

    Attributes:
        input_s: seconds of the first half.
        weight_s: seconds of the second half.
        handed_bytes: bytes of the values that the first half makes for the second half.
        kept_bytes: bytes of the other values that the second half reads: residuals of the forward,
            and cotangents of the layer's outputs.
    """

    input_s: float
    weight_s: float
    handed_bytes: int = 0
    kept_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """All bytes that are held between the halves."""
        return self.handed_bytes + self.kept_bytes

    def slower(self, times: float) -> "SplitCost":
        """Returns the cost of the backward on a device that takes `times` times as long."""
        return replace(self, input_s=times * self.input_s, weight_s=times * self.weight_s)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The seconds and bytes of a layer.

    Attributes:
        name: the name of the layer.
        forward_s: seconds of its forward.
        backward_s: seconds of its whole backward, if everything is kept.
        options: the ways to treat what its forward leaves. The first option keeps everything, and
            the last one recomputes the most.
        parameter_bytes: bytes of one version of its trained parameters, without tied ones
            (`Shared`). A stage may hold several versions.
        gradient_bytes: bytes of its gradients. For the layer of the loss, they include the losses
            and aux values that a step collects.
        optimizer_bytes: bytes of all that lasts between steps and has only one version: the state
            of the optimizer, and the model state, captured arrays and frozen parameters that no
            other layer uses.
        input_bytes: bytes of the inputs that only this layer's backward reads, per micro-batch in
            flight. They are called the layer's own inputs.
        temporary_bytes: bytes that the layer's programs need while they run if everything is kept,
            cotangents of inputs and outputs included.
        split: the cost of its backward in halves; None if the backward always runs whole.
        state_bytes: the part of `optimizer_bytes` that only one of several replicas keeps.
        update_s: seconds of its update.
    """

    name: str
    forward_s: float
    backward_s: float
    options: tuple[Option, ...]
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    input_bytes: int = 0
    temporary_bytes: int = 0
    split: SplitCost | None = None
    state_bytes: int = 0
    update_s: float = 0.0

    @property
    def reduced_bytes(self) -> int:
        """The bytes of gradients, which replicas sum up; if they are 0, those of the parameters."""
        return self.gradient_bytes or self.parameter_bytes

    def slower(self, times: float) -> "LayerCost":
        """Returns the cost of the layer on a device that takes `times` times as long for it.

        >>> LayerCost("block", 1.0, 2.0, (Option(0, extra_s=0.5),)).slower(2.0).options[0].extra_s
        1.0
        """
        options = (replace(option, extra_s=times * option.extra_s) for option in self.options)
        return replace(
            self,
            forward_s=times * self.forward_s,
            backward_s=times * self.backward_s,
            options=tuple(options),
            split=self.split and self.split.slower(times),
            update_s=times * self.update_s,
        )


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one layer makes and other layers read.

    A reader on another stage receives the value. If the value is `differentiable`, the reader
    returns the value's cotangent.
    """

    producer: int
    readers: tuple[int, ...]
    bytes: int
    name: str = ""
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Shared:
    """The bytes of a value that several `layers` use; a stage with any of them holds it once.

    A value that belongs to a micro-batch, such as a tensor that several backwards read, counts per
    micro-batch in flight. With `per_version`, a value counts once for each version of the
    parameters. These values are tied parameters, which several layers read and no layer's
    `parameter_bytes` include, and model state and captured arrays that several layers use.
    """

    layers: tuple[int, ...]
    bytes: int
    per_version: bool = False


def bounds_inside(groups: Iterable[Sequence[int]]) -> set[int]:
    """Returns the bounds at which no stage may end, because they would cut a group of layers.

    Bound i is between layers i - 1 and i.

    Args:
        groups: sets of layers; all layers of a set must be in the same stage.

    >>> sorted(bounds_inside([(1, 3), (5,)]))
    [2, 3]
    """
    return {bound for group in groups for bound in range(min(group) + 1, max(group) + 1)}


@dataclass(frozen=True)
class Costs:
    """The costs of a model: its layers in the order of the forward, and edges between them.

    Attributes:
        layers: the cost of each layer, in the order of the forward.
        edges: the values between layers.
        shared: the bytes that several layers hold together.
        together: sets of layers; all layers of a set must be in the same stage.
        ids: for each layer, its number in the source of the costs: the node of a graph file, or the
            id in a layer graph. If empty, layers are numbered by their place in `layers`.
        carried: sets of layers through which model state goes to the next micro-batch. A device
            that runs several stages must have the layers of a set in only one of its stages.
        outline: what exports need to know about the model; None if the source has no such outline.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    ids: tuple[int, ...] = ()
    carried: tuple[tuple[int, ...], ...] = ()
    outline: Outline | None = field(default=None, compare=False, repr=False)

    def edges_at(self, i: int, j: int) -> Iterable[Edge]:
        """Returns the edges that layers i to j - 1 make or read, each edge once."""
        return _distinct(self._edges_at[i:j])

    def shared_at(self, i: int, j: int) -> Iterable[Shared]:
        """Returns the shared bytes that layers i to j - 1 hold, each entry once."""
        return _distinct(self._shared_at[i:j])

    def gives_cotangent(self, layer: int) -> bool:
        """Tells whether an earlier layer waits for a cotangent from a layer's backward."""
        return layer in self._give_cotangents

    def made_bytes(self, layer: int) -> int:
        """Counts the bytes of the cotangents that other layers return to a layer."""
        edges = (edge for edge in self._edges_at[layer] if edge.differentiable)
        return sum(edge.bytes for edge in edges if edge.producer == layer)

    @cached_property
    def _give_cotangents(self) -> frozenset[int]:
        readers = (edge.readers for edge in self.edges if edge.differentiable)
        return frozenset[int]().union(*readers)

    @cached_property
    def _edges_at(self) -> list[list[Edge]]:
        concerned = ((edge, {edge.producer, *edge.readers}) for edge in self.edges)
        return _by_layer(len(self.layers), concerned)

    @cached_property
    def _shared_at(self) -> list[list[Shared]]:
        concerned = ((shared, set(shared.layers)) for shared in self.shared)
        return _by_layer(len(self.layers), concerned)


def _distinct(by_layer: Iterable[Iterable[T]]) -> Iterable[T]:
    """Returns each thing of several layers once, although it is listed at each of its layers."""
    # Two edges may have equal fields, so they are told apart by identity.
    return {id(thing): thing for thing in chain.from_iterable(by_layer)}.values()


def _by_layer(layers: int, things: Iterable[tuple[T, set[int]]]) -> list[list[T]]:
    """Lists, for each layer, the things that concern it."""
    concerning: list[list[T]] = [[] for _ in range(layers)]
    for thing, concerned in things:
        for layer in concerned:
            concerning[layer].append(thing)
    return concerning
