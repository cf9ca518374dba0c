"""The costs of a model, layer by layer: the numbers that planners and the simulator read.

Everything is for one micro-batch on one device. Where the numbers come from is another matter: measured, estimated
from the jaxpr, or read from a profile that others took.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import FATES, Fate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat what a layer's forward leaves for its backward: a point of the layer's frontier.

    `kept_bytes` stay on the device and `swapped_bytes` go to the host, both per micro-batch in flight; the backward
    takes `extra_s` longer and `extra_bytes` more while it runs, for what it recomputes. `fates` names what is
    not kept. `swaps_input` says that the layer's inputs are among the swapped.
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
    """A backward in two halves: their seconds, and the bytes that are there between them.

    `handed_bytes` are made by the first half for the second one; `kept_bytes` are what the second half still reads of
    what the forward left, and the cotangent that came in.
    """

    input_s: float
    weight_s: float
    handed_bytes: int = 0
    kept_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """All that is there between the halves."""
        return self.handed_bytes + self.kept_bytes

    def slower(self, times: float) -> "SplitCost":
        """The same on a device that takes so many times longer."""
        return replace(self, input_s=times * self.input_s, weight_s=times * self.weight_s)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer's seconds and bytes; `options[0]` keeps everything that may be kept.

    `input_bytes` are inputs that this layer's backward reads and no other's; they are held per micro-batch in flight.
    `parameter_bytes` are those of one version, `optimizer_bytes` of all that lasts and has one alone: the optimizer's
    state, model state, captured arrays, frozen parameters. `temporary_bytes` is what the forward or the backward needs
    for itself while it runs, gradients of inputs and outputs included. Without a `split` the backward runs
    whole.
    `state_bytes` of `optimizer_bytes` are the state that one replica of several keeps alone. `update_s` is what the
    optimizer takes for it each time that it has its gradients.
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
        """The bytes of its gradients, which replicas add up."""
        return self.gradient_bytes or self.parameter_bytes

    def slower(self, times: float) -> "LayerCost":
        """The same layer on a device that takes so many times longer for it.

        >>> LayerCost("block", 1.0, 2.0, (Option(0, extra_s=0.5),)).slower(2.0).options[0].extra_s
        1.0
        """
        return replace(
            self,
            forward_s=times * self.forward_s,
            backward_s=times * self.backward_s,
            options=tuple(
                replace(option, extra_s=times * option.extra_s) for option in self.options
            ),
            split=self.split and self.split.slower(times),
            update_s=times * self.update_s,
        )


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one layer makes and others read; on another stage it is sent, its cotangent comes back."""

    producer: int
    readers: tuple[int, ...]
    bytes: int
    name: str = ""
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that a stage holds once if any of `layers` is in it: a tensor of several readers, or a tied parameter.

    A tensor counts per micro-batch in flight, a tied parameter per version. Its owner's `parameter_bytes` do not
    count a tied parameter again.
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
    return {bound for group in groups for bound in range(min(group) + 1, max(group) + 1)}


@dataclass(frozen=True)
class Costs:
    """A model as planners see it: layers in the order of the forward, edges between them.

    `together` are groups of layers that must share a stage. `ids` are what the layers are called outside: the nodes
    of a graph file, or the ids of a layer graph. Model state goes through the groups of layers in `carried` on its way
    to the next micro-batch: they share a stage where a device runs several. `outline` is what exports must know.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[Edge, ...] = ()
    shared: tuple[Shared, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    ids: tuple[int, ...] = ()
    carried: tuple[tuple[int, ...], ...] = ()
    outline: Outline | None = field(default=None, compare=False, repr=False)

    def edges_at(self, i: int, j: int) -> Iterable[Edge]:
        """The edges that layers [i, j) make or read, each once."""
        return {id(edge): edge for at in self._edges_at[i:j] for edge in at}.values()

    def shared_at(self, i: int, j: int) -> Iterable[Shared]:
        """The shared bytes that layers [i, j) hold, each once."""
        return {id(shared): shared for at in self._shared_at[i:j] for shared in at}.values()

    def gives_cotangent(self, layer: int) -> bool:
        """Whether a layer before this one waits for what its backward gives."""
        return layer in self._give_cotangents

    def made_bytes(self, layer: int) -> int:
        """The bytes of differentiable values that a layer makes for others: those of the cotangents that come back."""
        edges = self.edges_at(layer, layer + 1)
        return sum(edge.bytes for edge in edges if edge.differentiable and edge.producer == layer)

    @cached_property
    def _give_cotangents(self) -> frozenset[int]:
        return frozenset(
            layer for edge in self.edges if edge.differentiable for layer in edge.readers
        )

    @cached_property
    def _edges_at(self) -> list[list[Edge]]:
        return _by_layer(
            len(self.layers), ((edge, {edge.producer, *edge.readers}) for edge in self.edges)
        )

    @cached_property
    def _shared_at(self) -> list[list[Shared]]:
        return _by_layer(len(self.layers), ((shared, set(shared.layers)) for shared in self.shared))


def _by_layer(layers: int, things: Iterable[tuple[T, set[int]]]) -> list[list[T]]:
    """Lists, for each layer, the things that concern it."""
    concerning: list[list[T]] = [[] for _ in range(layers)]
    for thing, concerned in things:
        for layer in concerned:
            concerning[layer].append(thing)
    return concerning
