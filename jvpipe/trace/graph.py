"""The layer graph of a loss, and the equations of each layer.

The main equations e0 to e5 of a loss are cut where few values cross (at `|`), and each run between
two cuts becomes a layer. Floating equations such as f0 and f1 (masks, positions, casts) are not
part of a run: each layer computes those that it needs.

    main        e0 e1 e2 | e3 e4 | e5      layers 0, 1 and 2
    floating    f0 f1
    layer 1     f1 e3 e4                   reads its parameters, f1's inputs, tensors of layer 0

A value that one layer makes and another reads is a tensor of the graph. An input of the loss does
not become a tensor: every layer that needs the input reads it directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref, Tensor
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body, body_of
from jvpipe.trace.cuts import narrow_cuts
from jvpipe.trace.layer_names import layer_names
from jvpipe.trace.loss import LossJaxpr, active, check_trained
from jvpipe.trace.primitives import flops
from jvpipe.trace.sorted_equations import Sorted
from jvpipe.trace.sums import settle_sums


@dataclass(frozen=True)
class Traced:
    """A layer graph with the equations behind it.

    Attributes:
        graph: the layers.
        bodies: the equations of each layer.
        loss: the loss that was cut into these layers.
        cuts: positions among the main equations; a layer ends at each.
        splits: further positions at which layers end, because the caller asked for them.
    """

    graph: LayerGraph
    bodies: tuple[Body, ...]
    loss: LossJaxpr
    cuts: tuple[int, ...]
    splits: tuple[int, ...] = ()

    @property
    def loss_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shape of the total and, if the loss is weighted, of the weight."""
        parts = self.loss.outputs_of(ValueKind.LOSS)
        return list(map(jaxprs.shape_of, parts))


def build_graph(
    loss: LossJaxpr,
    cuts: Sequence[int] | None = None,
    splits: Sequence[int] = (),
) -> Traced:
    """Cuts a traced loss into layers.

    Cheap values that depend on no parameter (masks) or only on parameters (casts) are computed by
    each layer that needs them. But `settle_sums` assigns some sums to a single layer.

    Args:
        loss: the traced loss.
        cuts: positions among its main equations; None for those that `narrow_cuts` finds.
        splits: further positions, inside the layers that the cuts make.
    """
    sorted_eqns = Sorted.of(loss)
    if cuts is None:
        cuts = narrow_cuts(sorted_eqns.main, sorted_eqns.weighted)
    # Cuts come from the trace and splits from the caller; a layer ends at either.
    bounds = [0, *sorted([*cuts, *splits]), len(sorted_eqns.main)]
    runs = [sorted_eqns.main[a:b] for a, b in pairwise(bounds)]
    outputs = jaxprs.variables(atom for atom, _ in loss.outputs)
    parameters = loss.inputs_of(ValueKind.PARAMETER)
    makes_loss = (i for i, run in enumerate(runs) if outputs[0] in jaxprs.defined(run))
    last = next(makes_loss, len(runs) - 1)
    floating, runs = settle_sums(
        sorted_eqns.floating,
        runs,
        parameters,
        outputs,
        last,
    )
    traced = _Assembly(loss, floating, runs, tuple(cuts), last).traced()
    return replace(traced, splits=tuple(splits))


def freeze(traced: Traced, frozen: frozenset[int]) -> Traced:
    """Returns the same layers with some parameters frozen: without updates and gradients.

    Args:
        traced: the layers.
        frozen: the numbers of the frozen parameters.

    Raises:
        ValueError: a parameter that is not frozen cannot be trained, or the loss depends
            only on frozen parameters.
    """
    loss = replace(traced.loss, frozen=frozen)
    check_trained(loss)
    return build_graph(loss, traced.cuts, traced.splits) if frozen else traced


@dataclass(frozen=True)
class _Assembly:
    """Makes the layers of a loss from the equations of each layer.

    Args:
        loss: the traced loss.
        floating: equations that each layer computes if it needs them.
        runs: the main equations of each layer.
        cuts: the `cuts` of `build_graph`, without its `splits`.
        last: the layer that makes the loss; it also yields the outputs that no run makes.
    """

    loss: LossJaxpr
    floating: tuple[JaxprEqn, ...]
    runs: list[tuple[JaxprEqn, ...]]
    cuts: tuple[int, ...]
    last: int

    def traced(self) -> Traced:
        """Returns the layers with their equations."""
        sinks = self._sinks()
        needs = list(map(self._needed, self.runs, sinks))
        readers = self._readers(needs, sinks)
        # Tensors are numbered in the order of the layers that make them.
        between = [v for v in readers if v in self.maker]
        crossing = sorted(between, key=self.maker.__getitem__)
        bodies = self._bodies(
            needs,
            sinks,
            readers,
            crossing,
        )
        paths = self.loss.names[ValueKind.PARAMETER]
        names = layer_names(bodies, self.runs, paths)
        layers = map(_layer, range(len(bodies)), names, bodies)
        flows = active(self.loss, self.loss.frozen)
        tensors = []
        for i, v in enumerate(crossing):
            producer = self.maker[v]
            tensors.append(
                Tensor(
                    array_of(v, f"{names[producer]}:{i}"),
                    producer,
                    tuple(readers[v]),
                    v in flows,
                )
            )
        graph = self._graph(tuple(layers), tuple(tensors), readers)
        return Traced(graph, tuple(bodies), self.loss, self.cuts)

    def _bodies(
        self,
        needs: Sequence[Sequence[JaxprEqn]],
        sinks: Sequence[Sequence[tuple[Atom, Ref]]],
        readers: dict[Var, list[int]],
        crossing: Sequence[Var],
    ) -> list[Body]:
        """Returns the bodies of all layers.

        Args:
            needs: the equations of each layer.
            sinks: the outputs of the loss that each layer yields.
            readers: the layers that read each input of the loss and each value between layers.
            crossing: the values between layers, in the order of their numbers.
        """
        refs = dict(self.loss.inputs)
        for i, v in enumerate(crossing):
            refs[v] = Ref(ValueKind.TENSOR, i)
        # A backward is made for all parameters, and then pruned to the gradients that are used;
        # `Body.returned` says why.
        flows = active(self.loss), active(self.loss, self.loss.frozen)
        bodies = []
        for layer, eqns in enumerate(needs):
            sent = [(v, refs[v]) for v in crossing if self.maker[v] == layer]
            reads = [(v, refs[v]) for v, layers in readers.items() if layer in layers]
            # Parameters come first; the sort is stable, so all others keep their order.
            reads.sort(key=lambda item: item[1].kind != ValueKind.PARAMETER)
            bodies.append(
                body_of(
                    eqns,
                    reads,
                    [*sent, *sinks[layer]],
                    flows,
                    self.runs[layer],
                )
            )
        return bodies

    @cached_property
    def maker(self) -> dict[Var, int]:
        """The layer that makes each value."""
        makers: dict[Var, int] = {}
        for layer, run in enumerate(self.runs):
            for eqn in run:
                makers |= dict.fromkeys(eqn.outvars, layer)
        return makers

    def _sinks(self) -> list[list[tuple[Atom, Ref]]]:
        """Returns for each layer the outputs of the loss that the layer yields.

        Leaves of the model state that the loss returns unchanged are left out.
        """
        sinks: list[list[tuple[Atom, Ref]]] = [[] for _ in self.runs]
        for atom, ref in self.loss.outputs:
            if isinstance(atom, _jax.Literal):
                sinks[self.last].append((atom, ref))
            elif ref.kind != ValueKind.STATE or self.loss.inputs.get(atom) != ref:
                sinks[self.maker.get(atom, self.last)].append((atom, ref))
        return sinks

    def _readers(
        self, needs: Sequence[Sequence[JaxprEqn]], sinks: Sequence[Sequence[tuple[Atom, Ref]]]
    ) -> dict[Var, list[int]]:
        """Returns the layers that read each input of the loss and each value between layers.

        Args:
            needs: the equations of each layer.
            sinks: the outputs of the loss that each layer yields.
        """
        readers: dict[Var, list[int]] = {}
        for layer, (eqns, sink) in enumerate(zip(needs, sinks, strict=True)):
            computed = jaxprs.defined(eqns)
            yielded = jaxprs.variables(atom for atom, _ in sink)
            passed_on = [v for v in yielded if v not in computed]
            for v in dict.fromkeys([*jaxprs.free_variables(eqns), *passed_on]):
                if v in self.loss.inputs or self.maker[v] != layer:
                    readers.setdefault(v, []).append(layer)
        writer: dict[Ref, int] = {}
        for layer, sink in enumerate(sinks):
            writer |= dict.fromkeys((ref for _, ref in sink), layer)
        for v, ref in self.loss.inputs.items():
            # A parameter that no layer reads still needs an owner, although its gradient is zero.
            if ref.kind == ValueKind.PARAMETER:
                readers.setdefault(v, [self.last])
            # If no layer reads a leaf of model state, the layer that writes the new value counts
            # as its reader, so that the old value lives until then.
            elif ref.kind == ValueKind.STATE and ref in writer:
                readers.setdefault(v, [writer[ref]])
        return readers

    def _needed(self, run: Sequence[JaxprEqn], sink: Sequence[tuple[Atom, Ref]]) -> list[JaxprEqn]:
        """Returns a layer's main equations after the floating equations that the layer needs."""
        yielded = jaxprs.variables(atom for atom, _ in sink)
        read = [*jaxprs.free_variables(run), *yielded]
        return [*jaxprs.prune(self.floating, read), *run]

    def _graph(
        self,
        layers: tuple[Layer, ...],
        tensors: tuple[Tensor, ...],
        readers: dict[Var, list[int]],
    ) -> LayerGraph:
        """Returns the layer graph.

        Args:
            layers: the layers.
            tensors: the values between layers.
            readers: the layers that read each input of the loss.
        """
        sharding = self.loss.sharding
        batch = self._arrays(ValueKind.BATCH)
        aux = [(atom, ref) for atom, ref in self.loss.outputs if ref.kind == ValueKind.AUX]
        # A `Weighted` leaf of aux has two values: its total and its weight.
        widths = [2 if is_pair else 1 for is_pair in self.loss.aux_weighted]
        starts = accumulate(widths, initial=0)
        return LayerGraph(
            layers,
            tensors,
            self._parameters(readers),
            tuple(map(sharding.batch, batch) if sharding else batch),
            tuple(self._arrays(ValueKind.STATE)),
            tuple(self._arrays(ValueKind.CONSTANT)),
            tuple(array_of(atom, f"aux{ref.index}") for atom, ref in aux),
            tuple(tuple(range(a, b)) for a, b in pairwise(starts)),
            self.loss.weighted,
            array_of(self.loss.outputs[0][0], "loss").bytes,
            self.loss.seed_words * 4,
            self.loss.aux_chosen,
            self.loss.state_chosen,
            self.loss.whole_layers,
        )

    def _parameters(self, readers: dict[Var, list[int]]) -> tuple[Parameter, ...]:
        """Returns the parameters; if places are meshes, with the bytes of each on one device.

        Args:
            readers: the layers that read each parameter.
        """
        arrays = self._arrays(ValueKind.PARAMETER)
        if self.loss.sharding is not None:
            pairs = zip(arrays, self.loss.specs, strict=True)
            arrays = [self.loss.sharding.laid(*pair) for pair in pairs]
        variables = sorted(self.loss.inputs_of(ValueKind.PARAMETER), key=self._index)
        parameters = []
        for array, v in zip(arrays, variables, strict=True):
            is_frozen = self._index(v) in self.loss.frozen
            parameters.append(Parameter(array, tuple(readers[v]), is_frozen))
        return tuple(parameters)

    def _arrays(self, kind: ValueKind) -> list[Array]:
        """Returns the inputs of a kind in the order of their numbers, with their names."""
        variables = sorted(self.loss.inputs_of(kind), key=self._index)
        paths = self.loss.names.get(kind)
        arrays = []
        for v in variables:
            i = self._index(v)
            arrays.append(array_of(v, paths[i] if paths else f"{kind}{i}"))
        return arrays

    def _index(self, v: Var) -> int:
        """Returns the number of an input among those of its kind."""
        return self.loss.inputs[v].index


def _layer(number: int, name: str, body: Body) -> Layer:
    candidates = tuple(array_of(v, name) for v, name in body.candidates.items())
    operations = sum(map(flops, body.eqns))
    return Layer(
        number,
        name,
        body.reads,
        body.writes,
        candidates,
        operations,
    )


def array_of(var: Atom, name: str) -> Array:
    """Returns a variable's shape and type under a name."""
    aval = _jax.aval(var)
    return Array(name, tuple(aval.shape), str(aval.dtype), jaxprs.bytes_of(var))
