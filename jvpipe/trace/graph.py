"""The layer graph of a loss, and the equations of each layer.

The main equations e0 to e5 of a loss are cut where few values cross (at `|`), and each run between
two cuts becomes a layer. Floating equations such as f0 and f1 (masks, positions, casts) belong to
no run: each layer computes the ones that it needs.

    main        e0 e1 e2 | e3 e4 | e5      layers 0, 1 and 2
    floating    f0 f1
    layer 1     f1 e3 e4                   reads its parameters, f1's inputs, tensors of layer 0

A value that one layer makes and another reads is a tensor of the graph. An input of the loss does
not become a tensor: every layer that needs the input reads it directly.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref, Tensor
from jvpipe.ir.values import VALUES, ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.cuts import narrow_cuts
from jvpipe.trace.keys import derives_key
from jvpipe.trace.loss import LossJaxpr, active, check_trained
from jvpipe.trace.primitives import flops, is_cheap, is_heavy, is_random
from jvpipe.trace.structure import Structure, structure
from jvpipe.trace.sums import settle_sums


@dataclass(frozen=True)
class Body:
    """The equations of a layer.

    `reads` and `inputs` go together item by item, and so do `writes` and `outputs`.

    Attributes:
        eqns: the equations, in order.
        reads: names of the values that the layer reads, parameters first.
        writes: names of the values that the layer writes.
        inputs: the variables of `reads`.
        outputs: the variables of `writes`.
        differentiable: marks the inputs that a gradient flows to if no parameter is frozen.
        active: marks the outputs whose cotangents the backward gets if no parameter is frozen.
        candidates: the variables whose fate (keep, swap or recompute) can be chosen, with names.
        returned: marks the inputs whose gradient is used. The backward is made for all
            differentiable inputs and then pruned to these. A backward made for fewer inputs would
            have other equations, and the compiler might round the remaining gradients differently.
        received: marks the outputs whose cotangents the backward gets, given the frozen parameters.
        share: the factor that multiplies the loss of a slice; below 1 only for a mean.
    """

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    differentiable: tuple[bool, ...]
    active: tuple[bool, ...]
    candidates: dict[Var, str]
    returned: tuple[bool, ...]
    received: tuple[bool, ...]
    share: float = 1.0

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """The numbers of the inputs that a gradient flows to."""
        return tuple(i for i, d in enumerate(self.differentiable) if d)

    @cached_property
    def structure(self) -> Structure:
        """A value that is equal for two bodies only if they compute the same function."""
        return structure(self.eqns, self.inputs, self.outputs)


@dataclass(frozen=True)
class Traced:
    """A layer graph with the equations behind it.

    Attributes:
        graph: the layers.
        bodies: the equations of each layer.
        loss: the loss that was cut into these layers.
        cuts: positions among the main equations: a layer ends before each.
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

    Cheap values made of no parameter (masks) or of parameters alone (casts) belong to no layer:
    each layer that needs one computes it. But `settle_sums` gives some sums to one layer.

    Args:
        loss: the traced loss.
        cuts: positions among its main equations; None: `narrow_cuts` finds them.
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


_DERIVATIONS = 6
"""A layer derives a PRNG key for itself if the key is at most this many steps from the seed.

A key that takes more steps is sent as a tensor. Otherwise, in a model that splits one key at each
layer, each layer would split more often than the layer before: no two could share a program.
"""


@dataclass(frozen=True)
class Sorted:
    """The equations of a loss, sorted into floating and main ones.

    Attributes:
        floating: the equations that each layer computes for itself if it needs them.
        main: the equations that exactly one layer computes, in order.
        weighted: marks the main equations that do heavy work with parameters, such as products.
    """

    floating: tuple[JaxprEqn, ...]
    main: tuple[JaxprEqn, ...]
    weighted: tuple[bool, ...]

    @staticmethod
    def of(loss: LossJaxpr) -> "Sorted":
        """Sorts the equations of a loss in one pass: each by its operands, which are made by
        earlier equations.
        """
        source = {v: ref.kind for v, ref in loss.inputs.items()}
        constants = {v for v, kind in source.items() if kind is ValueKind.CONSTANT}
        free = constants | {v for v, kind in source.items() if VALUES[kind].fed}
        parametric = {v for v, kind in source.items() if kind is ValueKind.PARAMETER}
        floating = []
        main = []
        weighted = []
        reading = []
        derivations: dict[Var, int] = {}  # how often a key was derived on the way from the seed
        for eqn in loss.eqns:
            read = set(jaxprs.variables(eqn.invars))
            before = max((derivations.get(v, 0) for v in read), default=0)
            steps = before + derives_key(eqn)
            derivations |= dict.fromkeys(eqn.outvars, steps)
            cheap = is_cheap(eqn) and not eqn.effects and steps <= _DERIVATIONS
            # Masks, positions and keys: made of constants and of inputs that every stage can get.
            if cheap and read <= free:
                free.update(eqn.outvars)
                constants.update(eqn.outvars if read <= constants else ())
                floating.append(eqn)
            # Casts and the like: a layer that reads the parameter makes them from it.
            elif cheap and read <= parametric | constants:
                parametric.update(eqn.outvars)
                floating.append(eqn)
            else:
                main.append(eqn)
                reading.append(not read.isdisjoint(parametric))
                weighted.append(is_heavy(eqn) and reading[-1])
        # If at most one equation is heavy and reads a parameter, as in a model without
        # products, every equation that reads a parameter counts as weighted.
        weighted = weighted if sum(weighted) > 1 else reading
        return Sorted(tuple(floating), tuple(main), tuple(weighted))


@dataclass(frozen=True)
class _Assembly:
    """Makes the layers of a loss from the equations of each layer.

    Args:
        loss: the traced loss.
        floating: equations that each layer computes if it needs them.
        runs: the main equations of each layer.
        cuts: the positions between the runs, without `splits` (see `build_graph`).
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
        needs = [self._needed(run, sink) for run, sink in zip(self.runs, sinks, strict=True)]
        readers = self._readers(needs, sinks)
        between = [(v, r) for v, r in readers.items() if v in self.maker]
        # Tensors are numbered in the order of the layers that make them.
        crossing = sorted(between, key=lambda item: self.maker[item[0]])
        refs = dict(self.loss.inputs)
        for i, (v, _) in enumerate(crossing):
            refs[v] = Ref(ValueKind.TENSOR, i)
        # A backward is made as if nothing were frozen, then pruned to the gradients that are used:
        # `Body.returned` says why.
        every = active(self.loss)
        flows = active(self.loss, self.loss.frozen)
        bodies = []
        for layer, eqns in enumerate(needs):
            sent = [v for v, _ in crossing if self.maker[v] == layer]
            writes = [*((v, refs[v]) for v in sent), *sinks[layer]]
            reads = [(v, refs[v]) for v, r in readers.items() if layer in r]
            # Parameters come first; the sort is stable, so all others keep their order.
            reads.sort(key=lambda item: item[1].kind != ValueKind.PARAMETER)
            candidates = _candidates(eqns, self.runs[layer])
            bodies.append(
                _body(
                    eqns,
                    reads,
                    writes,
                    (every, flows),
                    candidates,
                )
            )
        names = self._names(bodies)
        layers = map(_layer, range(len(bodies)), names, bodies)
        tensors = []
        for i, (v, of_tensor) in enumerate(crossing):
            producer = self.maker[v]
            array = array_of(v, f"{names[producer]}:{i}")
            tensors.append(
                Tensor(
                    array,
                    producer,
                    tuple(of_tensor),
                    v in flows,
                )
            )
        graph = self._graph(tuple(layers), tuple(tensors), readers)
        return Traced(graph, tuple(bodies), self.loss, self.cuts)

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
            # A parameter that no layer reads needs an owner all the same: its gradient is zero.
            if ref.kind == ValueKind.PARAMETER:
                readers.setdefault(v, [self.last])
            # If no layer reads a leaf of model state, the layer that writes the new value counts
            # as its reader, so that the old value lives until then.
            elif ref.kind == ValueKind.STATE and ref in writer:
                readers.setdefault(v, [writer[ref]])
        return readers

    def _needed(self, run: Sequence[JaxprEqn], sink: Sequence[tuple[Atom, Ref]]) -> list[JaxprEqn]:
        """Returns a layer's main equations after the floating equations that the layer needs."""
        read = [*jaxprs.free_variables(run), *jaxprs.variables(a for a, _ in sink)]
        return [*jaxprs.prune(self.floating, read), *run]

    def _names(self, bodies: Sequence[Body]) -> list[str]:
        """Names layers by the common module of the parameters that no earlier layer reads.

        If the layer has no such parameters, all parameters that it reads are used. Without
        a common module, the name is the common scope of the layer's heavy equations, else
        the module of its first parameter, else its number.
        """
        paths = self.loss.names[ValueKind.PARAMETER]
        seen, names = set(), []
        for i, (body, run) in enumerate(zip(bodies, self.runs, strict=True)):
            parameters = [ref.index for ref in body.reads if ref.kind is ValueKind.PARAMETER]
            fresh = [p for p in parameters if p not in seen]
            seen.update(fresh)
            scopes = [_jax.scope(eqn) for eqn in run if is_heavy(eqn)]
            modules = [_module(paths[p]) for p in fresh or parameters]
            first = modules[0] if modules else f"layer{i}"
            names.append(_common(modules) or _common(scopes) or first)
        return names

    def _graph(
        self,
        layers: tuple[Layer, ...],
        tensors: tuple[Tensor, ...],
        readers: dict[Var, list[int]],
    ) -> LayerGraph:
        def arrays(kind: ValueKind) -> list[tuple[Var, Array]]:
            inputs = {ref.index: v for v, ref in self.loss.inputs.items() if ref.kind == kind}
            names = self.loss.names.get(kind) or [f"{kind}{i}" for i in sorted(inputs)]
            return [(v, array_of(v, names[i])) for i, v in sorted(inputs.items())]

        sharding = self.loss.sharding
        owned = arrays(ValueKind.PARAMETER)
        laid = [array for _, array in owned]
        if sharding is not None:
            pairs = zip(laid, self.loss.specs, strict=True)
            laid = [sharding.laid(*pair) for pair in pairs]
        parameters = []
        for array, (v, _) in zip(laid, owned, strict=True):
            is_frozen = self.loss.inputs[v].index in self.loss.frozen
            parameters.append(
                Parameter(
                    array,
                    tuple(readers[v]),
                    is_frozen,
                )
            )
        batch = [array for _, array in arrays(ValueKind.BATCH)]
        aux_outputs = [pair for pair in self.loss.outputs if pair[1].kind == ValueKind.AUX]
        # A `Weighted` leaf of aux has two values: its total and its weight.
        widths = [2 if pair else 1 for pair in self.loss.aux_weighted]
        starts = list(accumulate(widths, initial=0))
        return LayerGraph(
            layers,
            tensors,
            tuple(parameters),
            tuple(map(sharding.batch, batch) if sharding else batch),
            tuple(array for _, array in arrays(ValueKind.STATE)),
            tuple(array for _, array in arrays(ValueKind.CONSTANT)),
            tuple(array_of(atom, f"aux{ref.index}") for atom, ref in aux_outputs),
            tuple(tuple(range(a, b)) for a, b in pairwise(starts)),
            self.loss.weighted,
            array_of(self.loss.outputs[0][0], "loss").bytes,
            self.loss.seed_words * 4,
            self.loss.aux_chosen,
            self.loss.state_chosen,
        )


def _body(
    eqns: Sequence[JaxprEqn],
    reads: Sequence[tuple[Var, Ref]],
    writes: Sequence[tuple[Atom, Ref]],
    flows: Sequence[Collection[Var]],
    candidates: dict[Var, str],
) -> Body:
    """Returns a layer's body.

    Args:
        eqns: its equations.
        reads: its inputs, parameters first.
        writes: its outputs.
        flows: two sets of values that gradients flow through: the first as if no parameter were
            frozen, the second given the frozen ones.
        candidates: the variables whose fate can be chosen, with names.
    """

    def inputs(flow: Collection[Var]) -> tuple[bool, ...]:
        summed = (ValueKind.PARAMETER, ValueKind.TENSOR)
        return tuple(ref.kind in summed and v in flow for v, ref in reads)

    def outputs(flow: Collection[Var]) -> tuple[bool, ...]:
        loss = Ref(ValueKind.LOSS, 0)
        are_tensors = [ref.kind == ValueKind.TENSOR and v in flow for v, ref in writes]
        pairs = zip(are_tensors, writes, strict=True)
        return tuple(is_tensor or ref == loss for is_tensor, (_, ref) in pairs)

    every, trained = flows
    return Body(
        tuple(eqns),
        tuple(ref for _, ref in reads),
        tuple(ref for _, ref in writes),
        tuple(v for v, _ in reads),
        tuple(v for v, _ in writes),
        inputs(every),
        outputs(every),
        candidates,
        inputs(trained),
        outputs(trained),
    )


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


def _module(path: str) -> str:
    """Returns a parameter's module: its path without the last word, unless that is a number."""
    module, word = os.path.split(path)
    return path if word.isdigit() else module or path


def _common(paths: Sequence[str]) -> str:
    """Returns the deepest path that all paths lie under."""
    steps = zip(*(path.split("/") for path in paths), strict=False)
    shared = takewhile(lambda step: len(set(step)) == 1, steps)
    return "/".join(step[0] for step in shared)


def _candidates(eqns: Sequence[JaxprEqn], main: Sequence[JaxprEqn]) -> dict[Var, str]:
    """Returns the values whose fate can be chosen, with names.

    They are random bits, and the results of heavy equations such as products, which XLA writes to
    memory in any case. If random bits only become a mask, the mask is returned in their place.

    Args:
        eqns: the equations of a layer.
        main: the main equations among them.
    """
    candidates: dict[Var, str] = {}
    for eqn in main:
        if not (is_heavy(eqn) or is_random(eqn)):
            continue
        for var in eqn.outvars:
            if not _jax.is_dropped(var):
                kept = _mask_of(var, eqns) if is_random(eqn) else var
                candidates[kept] = f"{eqn.primitive.name}_{len(candidates)}"
    return candidates


def _mask_of(bits: Var, eqns: Sequence[JaxprEqn]) -> Var:
    """Returns the boolean mask that random bits become; the bits, if anything else is made of them.

    A mask takes one byte per element where the bits take four. Only a chain of cheap equations is
    followed, in which only the next equation reads each result.
    """
    current = bits
    while True:
        readers = [eqn for eqn in eqns if current in jaxprs.variables(eqn.invars)]
        if len(readers) != 1:
            return bits
        if len(readers[0].outvars) != 1 or not is_cheap(readers[0]):
            return bits
        current = readers[0].outvars[0]
        if _jax.aval(current).dtype == bool:
            return current
