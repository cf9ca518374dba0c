"""The layer graph: what a model is once its loss has been traced and cut at its narrow places."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jvpipe.ir.reductions import AuxReduction, StateReduction
from jvpipe.ir.values import NEVER, Value, ValueKind


@dataclass(frozen=True, slots=True)
class Ref:
    """Names a value that a layer reads or writes, of any micro-batch: the `index`-th of its `kind`."""

    kind: ValueKind
    index: int


Spec = tuple[str | tuple[str, ...] | None, ...]
"""The axes of a place that each dimension of an array is cut along; () where each device of the place has it whole."""


@dataclass(frozen=True, slots=True)
class Array:
    """The shape and type of an array, and the name a reader knows it by.

    `spec` says how it lies over the devices of a place, if there are several; `bytes` are those of
    one of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    spec: Spec = ()


Source = tuple[Literal["input", "output", "residual"], int]


@dataclass(frozen=True, slots=True)
class Signature:
    """The interface between a layer's forward and its backward: what is left, taken and given.

    All indices are positions in the layer's `reads` (inputs) and `writes` (outputs). `residuals`
    exist for the backward alone; `sources` are the inputs, outputs and residuals it reads;
    `cotangents` the outputs whose cotangents it takes; `partial` the inputs whose cotangent it adds
    to a sum that comes in; `gradients` and `returned` the inputs whose gradients and cotangents it
    yields.
    """

    residuals: tuple[Array, ...]
    sources: tuple[Source, ...]
    cotangents: tuple[int, ...]
    partial: tuple[int, ...]
    gradients: tuple[int, ...]
    returned: tuple[int, ...]

    @property
    def is_idle(self) -> bool:
        """Whether there is no backward: nobody trains the layer, or anything before it."""
        return not (self.sources or self.cotangents or self.gradients or self.returned)


@dataclass(frozen=True, slots=True)
class SplitSignature:
    """The interface of a backward in two halves: `input` yields cotangents alone, `weight` gradients alone.

    `handed` is what the first leaves the second, beside what the forward left. The second adds to
    no partial sums.
    """

    handed: tuple[Array, ...]
    input: Signature
    weight: Signature


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that crosses from the layer that makes it straight to each layer that reads it."""

    array: Array
    producer: int
    readers: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A leaf of the parameters; several readers mean that it is tied, the first one owns it.

    One that is `frozen` has no gradient and no update, and one version for good.
    """

    array: Array
    readers: tuple[int, ...]
    frozen: bool = False

    @property
    def owner(self) -> int:
        """The layer that holds the parameter, its optimizer state and its update."""
        return self.readers[0]


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of equations between two narrow cuts: the unit of placement, compilation and migration.

    `reads` are in the order of its program's inputs (parameters first), `writes` of its outputs.
    `candidates` are the values inside it whose fate can be chosen: kept, swapped or recomputed.
    `flops` counts the products of one forward.
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
    """Layers in the order of their forwards, and the values between them, for one micro-batch."""

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    batch: tuple[Array, ...] = ()
    state: tuple[Array, ...] = ()
    constants: tuple[Array, ...] = ()
    aux: tuple[Array, ...] = ()
    aux_groups: tuple[tuple[int, ...], ...] = ()  # a pair is a `Weighted`
    weighted: bool = False
    loss_bytes: int = 4
    seed_bytes: int = 16
    aux_chosen: tuple[AuxReduction | None, ...] = ()  # what the user says of each leaf of aux
    state_chosen: tuple[StateReduction | None, ...] = ()  # those of the model state

    def label(self, layer: Layer) -> str:
        """Names a layer as plans do: with its id where several layers have that name.

        >>> layers = tuple(Layer(i, name, (), ()) for i, name in enumerate(["dense", "dense", "head"]))
        >>> [LayerGraph(layers, (), ()).label(layer) for layer in layers]
        ['dense@0', 'dense@1', 'head']
        """
        alone = sum(other.name == layer.name for other in self.layers) == 1
        return layer.name if alone else f"{layer.name}@{layer.id}"

    @property
    def examples(self) -> int:
        """The examples of a micro-batch."""
        return self.batch[0].shape[0]

    def owned(self, layer: int) -> tuple[int, ...]:
        """Finds the parameters that a layer owns."""
        return tuple(i for i, p in enumerate(self.parameters) if p.owner == layer)

    def trained(self, parameters: Iterable[int]) -> tuple[int, ...]:
        """Filters parameters: returns those that have a gradient and an update."""
        return tuple(p for p in parameters if not self.parameters[p].frozen)

    def parameter(self, p: int, version: int) -> Value:
        """Names a version of a parameter; a frozen one has no other than the first.

        >>> w = Array("w", (), "int8", 1)
        >>> graph = LayerGraph((), (), (Parameter(w, (0,)), Parameter(w, (0,), frozen=True)))
        >>> [str(graph.parameter(p, version=3)) for p in (0, 1)]
        ['parameter 0 version 3', 'parameter 1']
        """
        return Value(
            ValueKind.PARAMETER, p, version=NEVER if self.parameters[p].frozen else version
        )

    @property
    def loss_layer(self) -> int:
        """The layer that makes the loss."""
        return next(layer.id for layer in self.layers if Ref(ValueKind.LOSS, 0) in layer.writes)

    def aux_reduction(self, group: int) -> AuxReduction | None:
        """Tells how a leaf of aux is reduced over the micro-batches; None: stacked. A pair is `Weighted`: a mean."""
        first = self.aux[self.aux_groups[group][0]]
        is_mean = len(self.aux_groups[group]) > 1 or (first.shape == () and "float" in first.dtype)
        said = self.aux_chosen[group] if self.aux_chosen else None
        return said or (AuxReduction.MEAN if is_mean else None)

    def skips(self) -> Iterator[Tensor]:
        """Yields the tensors that are read beyond the next layer."""
        return (t for t in self.tensors if t.readers[-1] > t.producer + 1)

    def tied(self) -> Iterator[Parameter]:
        """Yields the parameters that several layers read."""
        return (p for p in self.parameters if len(p.readers) > 1)

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            parameters = sum(self.parameters[i].array.bytes for i in self.owned(layer.id))
            sent = ", ".join(self.tensors[i].array.name for i in layer.writing(ValueKind.TENSOR))
            lines.append(
                f"{layer.id:>4}  {layer.name:<40} {parameters / 2**20:9.2f} MiB  -> {sent or 'loss'}"
            )
        return "\n".join(lines)
