"""The layer graph: a model's layers and the values between them.

A loss is traced to equations. The equations are cut into layers at points that few values cross.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jvpipe.ir.reductions import AuxReduction, StateReduction
from jvpipe.ir.values import NEVER, Value, ValueKind


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of a value that a layer reads or writes, without its micro-batch.

    The value is the `index`-th of its `kind`.
    """

    kind: ValueKind
    index: int


Spec = tuple[str | tuple[str, ...] | None, ...]
"""For each dimension of an array, the axes of the device mesh over which it is cut, or None.

A spec may be shorter than the shape: the remaining dimensions are not cut.
"""


@dataclass(frozen=True, slots=True)
class Array:
    """The shape and type of an array, and the name that users see.

    If a place has several devices, `spec` says how the array is cut over them. `bytes` counts the
    bytes on one device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    spec: Spec = ()


Source = tuple[Literal["input", "output", "residual"], int]
"""A value of a layer's forward that the layer's backward reads, such as ("input", 2)."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The interface between a layer's forward and its backward.

    Indices are positions in the layer's `reads` (inputs), its `writes` (outputs) or `residuals`.

    Attributes:
        residuals: the values that the forward yields only for the backward.
        sources: the inputs, outputs and residuals that the backward reads.
        cotangents: the outputs whose cotangents the backward takes.
        partial: the inputs that later layers also read. The backward takes the sum of the
            cotangents from those layers, and adds its own cotangent.
        gradients: the inputs (parameters) whose gradients the backward yields.
        returned: the inputs (tensors) whose cotangents the backward yields.
    """

    residuals: tuple[Array, ...]
    sources: tuple[Source, ...]
    cotangents: tuple[int, ...]
    partial: tuple[int, ...]
    gradients: tuple[int, ...]
    returned: tuple[int, ...]

    @property
    def is_idle(self) -> bool:
        """Whether the layer has no backward: neither it nor a layer before it is trained."""
        return not (self.sources or self.cotangents or self.gradients or self.returned)


@dataclass(frozen=True, slots=True)
class SplitSignature:
    """The interface of a backward in two halves.

    The first half, `input`, yields only cotangents; the second half, `weight`, only gradients. The
    second half reads values that the forward has left, and the values `handed`, which the first
    half has left. Only the first half adds to partial sums of cotangents.
    """

    handed: tuple[Array, ...]
    input: Signature
    weight: Signature


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor between layers (an edge): it goes directly from its producer to each reader."""

    array: Array
    producer: int
    readers: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A leaf of the parameters.

    A parameter that several layers read is tied. Its first reader owns it. A `frozen`
    parameter has no gradient and no update, so it has only one version.
    """

    array: Array
    readers: tuple[int, ...]
    frozen: bool = False

    @property
    def owner(self) -> int:
        """The layer that the parameter, its optimizer state and its update belong to."""
        return self.readers[0]


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive equations between two narrow cuts.

    A layer is the unit that is placed, compiled and moved. `reads` are in the order of its
    program's inputs (parameters first), and `writes` in the order of its outputs. `candidates` are
    the values inside it whose fate can be chosen: kept, swapped or recomputed. `flops` counts the
    floating-point operations in the products and convolutions of one forward.
    """

    id: int
    name: str
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    candidates: tuple[Array, ...] = ()
    flops: int = 0

    def reading(self, kind: ValueKind) -> tuple[int, ...]:
        """Returns the indices of the values of one kind that the layer reads."""
        return tuple(ref.index for ref in self.reads if ref.kind == kind)

    def writing(self, kind: ValueKind) -> tuple[int, ...]:
        """Returns the indices of the values of one kind that the layer writes."""
        return tuple(ref.index for ref in self.writes if ref.kind == kind)


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The layers in the order of their forwards, and the values between them, per micro-batch."""

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    batch: tuple[Array, ...] = ()
    state: tuple[Array, ...] = ()
    constants: tuple[Array, ...] = ()
    aux: tuple[Array, ...] = ()  # what the loss returns besides its value
    aux_groups: tuple[tuple[int, ...], ...] = ()  # the leaves of each group; two for a `Weighted`
    weighted: bool = False  # whether the loss is a `Weighted`
    loss_bytes: int = 4
    seed_bytes: int = 16
    aux_chosen: tuple[AuxReduction | None, ...] = ()  # the user's choice for each group of aux
    state_chosen: tuple[StateReduction | None, ...] = ()  # the same for each leaf of the state
    whole_layers: bool = False  # whether layers are recomputed by their own forward programs

    def label(self, layer: Layer) -> str:
        """Names a layer as plans name it: with its id if several layers have the same name.

        >>> layers = tuple(Layer(i, name, (), ()) for i, name in enumerate(["dense", "dense", "head"]))
        >>> [LayerGraph(layers, (), ()).label(layer) for layer in layers]
        ['dense@0', 'dense@1', 'head']
        """
        alone = sum(other.name == layer.name for other in self.layers) == 1
        return layer.name if alone else f"{layer.name}@{layer.id}"

    @property
    def examples(self) -> int:
        """The number of examples of a micro-batch."""
        return self.batch[0].shape[0]

    def owned(self, layer: int) -> tuple[int, ...]:
        """Finds the parameters that a layer owns."""
        return tuple(i for i, p in enumerate(self.parameters) if p.owner == layer)

    def trained(self, parameters: Iterable[int]) -> tuple[int, ...]:
        """Returns the parameters that are not frozen, out of the given ones."""
        return tuple(p for p in parameters if not self.parameters[p].frozen)

    def parameter(self, p: int, version: int) -> Value:
        """Names a version of a parameter; all versions of a frozen parameter have the same name.

        >>> w = Array("w", (), "int8", 1)
        >>> graph = LayerGraph((), (), (Parameter(w, (0,)), Parameter(w, (0,), frozen=True)))
        >>> [str(graph.parameter(p, version=3)) for p in (0, 1)]
        ['parameter 0 version 3', 'parameter 1']
        """
        is_frozen = self.parameters[p].frozen
        return Value(ValueKind.PARAMETER, p, version=NEVER if is_frozen else version)

    @property
    def weight_type(self) -> str:
        """The type of the sum of the weights of a `Weighted` loss: that of the loss, or float32 if
        the loss has fewer bits.
        """
        return "float64" if self.loss_bytes == 8 else "float32"

    @property
    def loss_layer(self) -> int:
        """The layer that makes the loss."""
        return next(layer.id for layer in self.layers if Ref(ValueKind.LOSS, 0) in layer.writes)

    def aux_reduction(self, group: int) -> AuxReduction | None:
        """Tells how a group of aux is reduced over the micro-batches; None if it is stacked.

        The user's choice takes precedence. Without a choice, a `Weighted` (a pair of leaves) and a
        floating-point scalar are reduced by a mean.
        """
        chosen = self.aux_chosen[group] if self.aux_chosen else None
        if chosen:
            return chosen
        leaves = self.aux_groups[group]
        first = self.aux[leaves[0]]
        is_float_scalar = first.shape == () and "float" in first.dtype
        return AuxReduction.MEAN if len(leaves) > 1 or is_float_scalar else None

    def skips(self) -> Iterator[Tensor]:
        """Yields the tensors that skip at least one layer on their way to a reader."""
        return (t for t in self.tensors if t.readers[-1] > t.producer + 1)

    def tied(self) -> Iterator[Parameter]:
        """Yields the parameters that several layers read."""
        return (p for p in self.parameters if len(p.readers) > 1)

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            owned = [self.parameters[i].array for i in self.owned(layer.id)]
            mib = sum(array.bytes for array in owned) / 2**20
            written = [self.tensors[i].array for i in layer.writing(ValueKind.TENSOR)]
            sent = ", ".join(array.name for array in written) or "loss"
            lines.append(f"{layer.id:>4}  {layer.name:<40} {mib:9.2f} MiB  -> {sent}")
        return "\n".join(lines)
