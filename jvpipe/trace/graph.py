"""The layer graph of a loss, and the equations of each layer.

    loss        e0 e1 e2 | e3 e4 | e5        main equations, cut at narrow places into runs, one per layer
    floating    f0 f1                        masks, positions, casts: each layer computes those that it needs
    layer 1     f1 e3 e4                     reads f1's inputs, its parameters, and tensors of layer 0

A value that another layer reads is a tensor between the two; each input of the loss is read where
it is needed.
"""

import math
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

    Attributes:
        eqns: in order.
        reads: what it reads, parameters first.
        writes: what it writes.
        inputs: the variables of what it reads.
        outputs: the variables of what it writes.
        differentiable: marks the inputs that a gradient flows to.
        active: marks the outputs that a gradient comes from.
        candidates: the variables whose fate can be chosen, by name.
        returned: marks the inputs whose gradient somebody reads. The backward is made for all that
            are differentiable and pruned to these: else it would have other equations, and the
            compiler might round the rest differently.
        received: marks the outputs whose gradient comes.
        share: of a slice's loss in that of the micro-batch, where the loss is a mean.
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
        """Equal for bodies that compute the same."""
        return structure(self.eqns, self.inputs, self.outputs)


@dataclass(frozen=True)
class Traced:
    """A layer graph with the equations behind it.

    Attributes:
        graph: the layers.
        bodies: their equations.
        loss: what was cut.
        cuts: the places, among the main equations, at which it was.
        splits: further places, inside the layers of these.
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
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(_jax.aval, parts)]


def build_graph(
    loss: LossJaxpr,
    cuts: Sequence[int] | None = None,
    splits: Sequence[int] = (),
) -> Traced:
    """Cuts a traced loss into layers.

    Values that depend on no parameter and cost little, and cheap functions only of parameters
    (casts), belong to no layer: each layer that needs one recomputes it (but see `settle_sums`).

    Args:
        loss: traced.
        cuts: positions in its main equations; None: its narrow places.
        splits: further positions, inside the layers that the cuts make.
    """
    sorted_eqns = Sorted.of(loss)
    if cuts is None:
        cuts = narrow_cuts(sorted_eqns.main, sorted_eqns.weighted)
    # Cuts are found at each trace, splits are asked for: both end a layer.
    bounds = [0, *sorted([*cuts, *splits]), len(sorted_eqns.main)]
    runs = [sorted_eqns.main[a:b] for a, b in pairwise(bounds)]
    outputs = jaxprs.variables(atom for atom, _ in loss.outputs)
    parameters = loss.inputs_of(ValueKind.PARAMETER)
    last = len(runs) - 1
    for i, run in enumerate(runs):
        if not jaxprs.defined(run).isdisjoint(outputs[:1]):
            last = i
            break
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
    """Returns the same layers where nothing updates some parameters, or reads a gradient of them.

    Args:
        traced: the layers.
        frozen: the numbers of these parameters.

    Raises:
        ValueError: a parameter that is not frozen cannot be trained, or all are frozen.
    """
    loss = replace(traced.loss, frozen=frozen)
    check_trained(loss)
    return build_graph(loss, traced.cuts, traced.splits) if frozen else traced


_DERIVATIONS = 6
"""Keys that are derived in more steps are sent instead of recomputed: each link of a long chain
would make its layer a program of its own.
"""


@dataclass(frozen=True)
class Sorted:
    """The equations of a loss, sorted.

    Attributes:
        floating: those that are computed wherever they are needed.
        main: those that are computed once, in order.
        weighted: marks the main ones that do real work with parameters.
    """

    floating: tuple[JaxprEqn, ...]
    main: tuple[JaxprEqn, ...]
    weighted: tuple[bool, ...]

    @staticmethod
    def of(loss: LossJaxpr) -> "Sorted":
        """Sorts the equations of a loss, in one pass: a place depends only on what an equation
        reads.
        """
        source = {v: ref.kind for v, ref in loss.inputs.items()}
        constants = {v for v, kind in source.items() if kind is ValueKind.CONSTANT}
        free = constants | {v for v, kind in source.items() if VALUES[kind].fed}
        parametric = {v for v, kind in source.items() if kind is ValueKind.PARAMETER}
        floating = []
        main = []
        weighted = []
        reading = []
        derivations: dict[Var, int] = {}  # of keys
        for eqn in loss.eqns:
            read = set(jaxprs.variables(eqn.invars))
            # How often a key was derived on the way from the seed.
            before = max((derivations.get(v, 0) for v in read), default=0)
            steps = before + derives_key(eqn)
            derivations |= dict.fromkeys(eqn.outvars, steps)
            cheap = is_cheap(eqn) and not eqn.effects and steps <= _DERIVATIONS
            # Masks, positions and keys: made of constants and of what every stage can be fed.
            if cheap and read <= free:
                free.update(eqn.outvars)
                constants.update(eqn.outvars if read <= constants else ())
                floating.append(eqn)
            # Casts and the like: whoever reads the parameter makes them of it.
            elif cheap and read <= parametric | constants:
                parametric.update(eqn.outvars)
                floating.append(eqn)
            else:
                main.append(eqn)
                reading.append(not read.isdisjoint(parametric))
                weighted.append(is_heavy(eqn) and reading[-1])
        # A model without products has no weighted operation: then whatever reads a parameter counts
        # as one.
        weighted = weighted if sum(weighted) > 1 else reading
        return Sorted(tuple(floating), tuple(main), tuple(weighted))


@dataclass(frozen=True)
class _Assembly:
    """Puts the layers of a loss together.

    Args:
        loss: traced.
        floating: equations that each layer computes if it needs them.
        runs: the main equations of each layer.
        cuts: between them.
        last: the layer of the loss; what no run makes is made there.
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
        # Backwards are made as if nothing was frozen, and pruned to what is read: see
        # `Body.returned`.
        every = active(self.loss)
        flows = active(self.loss, self.loss.frozen)
        bodies = []
        for layer, eqns in enumerate(needs):
            sent = [v for v, _ in crossing if self.maker[v] == layer]
            writes = [*((v, refs[v]) for v in sent), *sinks[layer]]
            reads = [(v, refs[v]) for v, r in readers.items() if layer in r]
            # Parameters first; all others keep their order.
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
        layers = [_layer(i, body) for i, body in enumerate(bodies)]
        names = self._names(layers)
        # Names need all layers: a layer is named by parameters that no earlier one reads.
        pairs = zip(layers, names, strict=True)
        layers = [replace(layer, name=name) for layer, name in pairs]
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
        """Returns the outputs of the loss that each layer yields.

        Model state that nobody changes is left out.
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
        """Returns the layers that read each input of the loss, and each value of another layer.

        Args:
            needs: the equations of each layer.
            sinks: the outputs of the loss that each yields.
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
            # A parameter that nothing reads has an owner too, and a gradient of zeros.
            if ref.kind == ValueKind.PARAMETER:
                readers.setdefault(v, [self.last])
            # Where nothing reads model state, the old one ends with the new.
            elif ref.kind == ValueKind.STATE and ref in writer:
                readers.setdefault(v, [writer[ref]])
        return readers

    def _needed(self, run: Sequence[JaxprEqn], sink: Sequence[tuple[Atom, Ref]]) -> list[JaxprEqn]:
        """Returns a layer's main equations, preceded by the floating ones that they need."""
        read = [*jaxprs.free_variables(run), *jaxprs.variables(a for a, _ in sink)]
        return [*jaxprs.prune(self.floating, read), *run]

    def _names(self, layers: Sequence[Layer]) -> list[str]:
        """Names each layer by the module of the parameters that it is the first to read.

        Else by its name scopes.
        """
        paths = self.loss.names[ValueKind.PARAMETER]
        seen, names = set(), []
        for layer, run in zip(layers, self.runs, strict=True):
            parameters = layer.reading(ValueKind.PARAMETER)
            fresh = [i for i in parameters if i not in seen]
            seen.update(fresh)
            scopes = [_jax.scope(eqn) for eqn in run if is_heavy(eqn)]
            modules = [_module(paths[i]) for i in fresh or parameters]
            first = modules[0] if modules else f"layer{layer.id}"
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
        # A `Weighted` leaf of aux has two values, its total and its weight.
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
        eqns: what it computes.
        reads: its inputs, parameters first.
        writes: its outputs.
        flows: the values that gradients flow through, of all parameters and of those that are not
            frozen.
        candidates: those whose fate can be chosen, by name.
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


def _layer(number: int, body: Body) -> Layer:
    """Returns a layer that has no name yet."""
    candidates = tuple(array_of(v, name) for v, name in body.candidates.items())
    operations = sum(map(flops, body.eqns))
    return Layer(
        number,
        "",
        body.reads,
        body.writes,
        candidates,
        operations,
    )


def array_of(var: Atom, name: str) -> Array:
    """Returns a variable's shape and type under a name."""
    aval = _jax.aval(var)
    size = math.prod(aval.shape) * aval.dtype.itemsize
    return Array(name, tuple(aval.shape), str(aval.dtype), size)


def _module(path: str) -> str:
    """Returns the module that a parameter belongs to: its path without the last word, unless that
    is a number.
    """
    module, word = os.path.split(path)
    return path if word.isdigit() else module or path


def _common(paths: Sequence[str]) -> str:
    """Returns the deepest path that all paths lie under."""
    steps = zip(*(path.split("/") for path in paths), strict=False)
    shared = takewhile(lambda step: len(set(step)) == 1, steps)
    return "/".join(step[0] for step in shared)


def _candidates(eqns: Sequence[JaxprEqn], main: Sequence[JaxprEqn]) -> dict[Var, str]:
    """Names what XLA materialises anyway: results of products and the like.

    Random bits are named by the mask that is made of them.

    Args:
        eqns: of a layer.
        main: those of them that it does not recompute for itself.
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
    """Returns the boolean that a value of random bits becomes, if nothing else is made of them.

    Else the bits.

    A mask takes a byte per element, the bits four. Only a chain of cheap equations, each the only
    reader of the one before, is followed.
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
