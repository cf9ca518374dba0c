"""The costs of a model, layer by layer: the numbers that planners and the simulator read.

All numbers are for one micro-batch on one device. They may be measured (`measure.py`), estimated
from the jaxpr (`estimate.py`), or read from a profile of others (`profiles/`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import FATES, Fate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat what a layer's forward leaves for its backward: a point of the layer's
    frontier.

    Attributes:
        kept_bytes: that stay on the device, per micro-batch in flight.
        swapped_bytes: that go to the host, per micro-batch in flight.
        extra_s: seconds that the backward takes longer, for what it recomputes.
        extra_bytes: that the backward needs more while it runs.
        fates: of all values that are not kept, by name.
        swaps_input: whether the layer's inputs are swapped, too.
    """

    kept_bytes: int
    swapped_bytes: int = 0
    extra_s: float = 0.0
    extra_bytes: int = 0
    fates: Mapping[str, Fate] = field(default_factory=dict)
    swaps_input: bool = False

    def __post_init__(self) -> None:
        assert FATES.keys() >= set(self.fates.values()), "what planners know stands in the table"


@dataclass(frozen=True, slots=True)
class SplitCost:
    """A backward in two halves: their seconds, and the bytes that are held between them.

    Attributes:
        input_s: of the first half, which yields cotangents.
        weight_s: of the second half, which yields gradients.
        handed_bytes: that the first half makes for the second one.
        kept_bytes: that the second half still reads of what the forward left, and the cotangent.
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
        """Returns the same backward on a device that takes so many times longer."""
        return replace(self, input_s=times * self.input_s, weight_s=times * self.weight_s)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The seconds and bytes of a layer.

    Attributes:
        name: of it.
        forward_s: of its forward.
        backward_s: of its whole backward, with everything kept.
        options: the first keeps everything that may be kept.
        parameter_bytes: of one version of its parameters.
        gradient_bytes: of what a step sums up or collects.
        optimizer_bytes: of all that lasts in a single version: optimizer's state, model state,
            captured arrays, frozen parameters.
        input_bytes: of inputs that no other layer's backward reads, per micro-batch in flight.
        temporary_bytes: that a program of the layer needs while it runs, with gradients of inputs
            and outputs.
        split: the backward in halves; None if it always runs whole.
        state_bytes: the part of `optimizer_bytes` that only one of several replicas keeps.
        update_s: of its update.
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
        """The bytes of its gradients, which replicas sum up."""
        return self.gradient_bytes or self.parameter_bytes

    def slower(self, times: float) -> "LayerCost":
        """Returns the same layer on a device that takes so many times longer for it.

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
    """A value that one layer makes and others read.

    Readers on other stages receive it and return its cotangent.
    """

    producer: int
    readers: tuple[int, ...]
    bytes: int
    name: str = ""
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that a stage holds once if any of `layers` is in it: a tensor of several readers, or a
    tied parameter.

    A tensor counts per micro-batch in flight, a tied parameter per version. The `parameter_bytes`
    of its owner do not contain a tied parameter.
    """

    layers: tuple[int, ...]
    bytes: int
    per_version: bool = False


def bounds_inside(groups: Iterable[Sequence[int]]) -> set[int]:
    """Returns the bounds between layers that lie inside a group of layers, where no stage may end.

    Args:
        groups: layers that must share a stage.

    >>> sorted(bounds_inside([(1, 3), (5,)]))
    [2, 3]
    """
    bounds: set[int] = set()
    for group in groups:
        bounds.update(range(min(group) + 1, max(group) + 1))
    return bounds


@dataclass(frozen=True)
class Costs:
    """A model as planners see it: layers in the order of the forward, edges between them.

    Attributes:
        layers: in the order of the forward.
        edges: values between layers.
        shared: bytes that several layers hold together.
        together: groups of layers that must share a stage.
        ids: the layers' names outside: the nodes of a graph file, or the ids of a layer graph.
        carried: groups of layers through which model state goes to the next micro-batch; on a
            device that runs several stages each group must share one.
        outline: the model as exports need it.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    ids: tuple[int, ...] = ()
    carried: tuple[tuple[int, ...], ...] = ()
    outline: Outline | None = field(default=None, compare=False, repr=False)

    def edges_at(self, i: int, j: int) -> Iterable[Edge]:
        """Returns the edges that layers [i, j) make or read, each once."""
        edges = chain.from_iterable(self._edges_at[i:j])
        return {id(edge): edge for edge in edges}.values()

    def shared_at(self, i: int, j: int) -> Iterable[Shared]:
        """Returns the shared bytes that layers [i, j) hold, each once."""
        shared = chain.from_iterable(self._shared_at[i:j])
        return {id(values): values for values in shared}.values()

    def gives_cotangent(self, layer: int) -> bool:
        """Tells whether a layer before this one waits for a cotangent of its backward."""
        return layer in self._give_cotangents

    def made_bytes(self, layer: int) -> int:
        """Counts the bytes of the cotangents that other layers return to a layer."""
        own_edges = (edge for edge in self.edges_at(layer, layer + 1) if edge.producer == layer)
        return sum(edge.bytes for edge in own_edges if edge.differentiable)

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


def _by_layer(layers: int, things: Iterable[tuple[T, set[int]]]) -> list[list[T]]:
    """Lists, for each layer, the things that concern it."""
    concerning: list[list[T]] = [[] for _ in range(layers)]
    for thing, concerned in things:
        for layer in concerned:
            concerning[layer].append(thing)
    return concerning
