"""Makes a model's layers for a slice of a micro-batch, the part that one replica of a stage has.

The loss is traced again at the size of the slice, and cut into the same layers. If the
loss is a mean, a slice's loss is multiplied by the slice's share (its fraction of the
examples). So the losses of all slices add up to the mean.

Random numbers and positions are made for the whole micro-batch, and each slice takes its part. So
every replica draws all numbers, and dropout masks do not depend on the number of replicas. For a
slice of examples 2 and 3 of 8:

    whole     bits[8, 4] = random_bits key
    slice     bits[8, 4] = random_bits key    part[2, 4] = bits[2:4]
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.layers import Layer, LayerGraph, Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import Body, Traced, build_graph
from jvpipe.trace.loss import LossJaxpr, active
from jvpipe.trace.normalized import first_of_same
from jvpipe.trace.one_example import UnlikeError, on_one
from jvpipe.trace.reductions import NONE, Beside, Lies
from jvpipe.trace.said import Said, aux_group
from jvpipe.trace.spread import GENERATORS, CoupledError, Spreading, reaching
from jvpipe.trace.structure import comparable
from jvpipe.util.paths import path_name

_LOOPS = ("scan", "while", "cond", "jit", "pjit", "closed_call", "checkpoint", "remat2", "remat")
"""Primitives whose bodies are rewritten for a slice."""


@dataclass(frozen=True)
class Apart:
    """What the trace says about a loss whose slices can be computed apart.

    Attributes:
        batching: how the edges between layers, aux, the loss and the model state lie over the
            examples.
        amended: the equations, by `id`, that slices change, and how.
    """

    batching: Batching
    amended: Mapping[int, Beside]


def sliced(
    traced: Traced,
    examples: Examples,
    apart: Apart,
) -> Traced:
    """Returns the same layers for a slice of the examples.

    Args:
        traced: the layers on a whole micro-batch.
        examples: the slice of the micro-batch.
        apart: how the examples come apart, from `taken_apart`.

    Raises:
        CoupledError: the loss has other layers at the size of the slice.
    """
    loss = replace(_resized(traced, examples.size), frozen=traced.loss.frozen)
    smaller = build_graph(loss, traced.cuts, traced.splits)
    if _layers(smaller.graph) != _layers(traced.graph):
        raise CoupledError(
            f"the loss on {examples.size} examples is not made of the layers that it has on {traced.graph.examples}: "
            "use larger micro-batches or fewer replicas, so that each has at least 2 examples"
        )
    cut = _Cut(examples, traced.graph.examples, apart)
    return replace(smaller, bodies=tuple(map(cut.body, traced.bodies, smaller.bodies)))


def _resized(traced: Traced, examples: int) -> LossJaxpr:
    """Returns the loss on another number of examples."""
    loss = traced.loss
    assert loss.of_size is not None, "a loss that was not traced from a function"
    # JAX traces some functions differently at a size of one. So the equations of the whole
    # micro-batch are kept if possible.
    if examples == 1:
        try:
            return on_one(loss, traced.graph.examples)
        except UnlikeError:
            pass  # use the loss as JAX traces it at a size of one
    try:
        return loss.of_size(examples)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CoupledError(
            f"the loss does not take {examples} examples, which is what a replica has: {type(error).__name__}: {reason}"
        ) from error


def _layers(graph: LayerGraph) -> object:
    """Returns a value that is equal for two layer graphs if they differ only in sizes."""
    candidates = [[c.name for c in layer.candidates] for layer in graph.layers]
    layers = [(layer.reads, layer.writes) for layer in graph.layers]
    crossing = operator.attrgetter("producer", "readers", "differentiable")
    tensors = list(map(crossing, graph.tensors))
    readers = [parameter.readers for parameter in graph.parameters]
    return layers, candidates, tensors, readers


@dataclass(frozen=True)
class _Cut:
    """The rewriting of layers for one slice of a micro-batch.

    Args:
        examples: the examples of the slice.
        total: the number of examples of the micro-batch.
        apart: how the examples come apart.
    """

    examples: Examples
    total: int
    apart: Apart

    @property
    def share(self) -> float:
        """The number of examples of the slice, divided by that of the micro-batch."""
        return self.examples.size / self.total

    def body(self, whole: Body, part: Body) -> Body:
        """Returns a layer on a slice, whose random numbers are cut out of the whole layer's.

        Args:
            whole: the layer on the micro-batch.
            part: the layer as traced at the size of the slice.
        """
        eqns = self._equations(whole.eqns, part.eqns)
        makes_loss = Ref(ValueKind.LOSS, 0) in part.writes
        is_mean = makes_loss and self.apart.batching.loss.over is Over.MEAN
        return replace(
            part,
            eqns=tuple(eqns),
            share=self.share if is_mean else 1.0,
        )

    def _equations(self, whole: Sequence[JaxprEqn], part: Sequence[JaxprEqn]) -> Sequence[JaxprEqn]:
        """Returns the equations of a layer, or of a loop in it, on a slice.

        Args:
            whole: the equations on the micro-batch.
            part: the same equations as traced at the size of the slice.
        """
        eqns: list[JaxprEqn] = []
        for of_whole, of_part in zip(whole, part, strict=True):
            name = of_whole.primitive.name
            if name in GENERATORS:
                eqns += self._generated(of_whole, of_part)
            elif name in _LOOPS:
                params = {k: self._inside(v, of_part.params[k]) for k, v in of_whole.params.items()}
                eqns.append(of_part.replace(params=of_part.params | params))
            else:
                beside = self.apart.amended.get(id(of_whole))
                is_first = self.examples.start == 0
                eqns += _amended(
                    of_part,
                    beside,
                    self.share,
                    is_first=is_first,
                )
        return eqns

    def _inside(self, whole: Any, part: Any) -> Any:
        """Returns a parameter of a loop or call for a slice; bodies in it may draw numbers, too.

        Args:
            whole: the parameter on the micro-batch.
            part: the same parameter as traced at the size of the slice.
        """
        match part:
            case ClosedJaxpr():
                return ClosedJaxpr(self._inside(whole.jaxpr, part.jaxpr), part.consts)
            case Jaxpr():
                return part.replace(eqns=list(self._equations(whole.eqns, part.eqns)))
            case tuple():
                pairs = zip(whole, part, strict=True)
                items = [self._inside(a, b) for a, b in pairs]
                is_same = all(map(operator.is_, items, part))
                return part if is_same else tuple(items)
            case _:
                return part

    def _generated(self, whole: JaxprEqn, part: JaxprEqn) -> Sequence[JaxprEqn]:
        """Returns the equations that make the whole micro-batch's numbers and cut out a slice's."""
        aval = _jax.aval(whole.outvars[0])
        of_part = _jax.aval(part.outvars[0])
        operands = zip(whole.invars, part.invars, strict=True)
        same_operands = all(_jax.aval(a).shape == _jax.aval(b).shape for a, b in operands)
        sizes = zip(aval.shape, of_part.shape, strict=True)
        axes = [i for i, (a, b) in enumerate(sizes) if a != b]
        if not axes or not same_operands:
            return [part]
        (axis,) = axes
        # An example may have several rows: a reshape may have put its tokens on the examples' axis.
        rows = aval.shape[axis] // self.total
        start = self.examples.start * rows
        stop = self.examples.stop * rows

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.slice_in_dim(x, start, stop, axis=axis)

        drawn = _jax.new_variable(aval)
        draw = whole.replace(invars=part.invars, outvars=[drawn])
        return [draw, *_equations(cut, [drawn], part.outvars)]


def _amended(
    eqn: JaxprEqn,
    beside: Beside | None,
    share: float,
    *,
    is_first: bool,
) -> Sequence[JaxprEqn]:
    """Returns the equations that a slice computes in place of one equation.

    Args:
        eqn: the equation.
        beside: which of its operands a slice changes, and how; None: the equation stays.
        share: the share of the slice in the micro-batch.
        is_first: whether the slice is the first one of the micro-batch.
    """
    only_first = beside in (Beside.FIRST_LEFT, Beside.FIRST_RIGHT)
    if beside is None or (only_first and is_first):
        return [eqn]
    if beside is Beside.GUARD:
        (count,) = jaxprs.variables(eqn.invars)
        return [eqn.replace(invars=[count, count])]
    if beside is Beside.DIVISOR:
        return _equations(_quotient, eqn.invars, eqn.outvars)
    side = 0 if beside in (Beside.LEFT, Beside.FIRST_LEFT) else 1
    operand = eqn.invars[side]
    changed = _jax.new_variable(_jax.aval(operand))

    def change(x: jax.Array) -> jax.Array:
        if only_first:
            # This makes zeros by an equation that reads x. Plain zeros would become a constant of
            # the traced function, and a layer's equations cannot bring new constants.
            return jax.lax.clamp(
                jnp.zeros((), x.dtype),
                x,
                jnp.zeros((), x.dtype),
            )
        return x * jnp.asarray(share, x.dtype)

    invars = [changed if i == side else atom for i, atom in enumerate(eqn.invars)]
    return [*_equations(change, [operand], [changed]), eqn.replace(invars=invars)]


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    """Divides a sum by a count.

    In a slice without items both are zero, and the quotient is zero. If only the count is zero, the
    result is NaN, and `stop_gradient` keeps that NaN out of the derivative.
    """
    quotient = total / jnp.where(count == 0, jnp.ones_like(count), count)
    lost = (count == 0) & (jax.lax.stop_gradient(total) != 0)
    return quotient + jnp.where(lost, jnp.asarray(jnp.nan, total.dtype), jnp.zeros_like(total))


def _equations(
    fn: Callable[..., jax.Array],
    inputs: Sequence[Atom],
    outputs: Sequence[Var],
) -> Sequence[JaxprEqn]:
    """Returns the equations by which a function makes output variables from inputs.

    Args:
        fn: the function, from arrays to an array.
        inputs: the variables or literals that it reads.
        outputs: the variables that stand for its results.
    """
    closed = flatten(fn, *map(jaxprs.shape_of, inputs))
    names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    results = zip(closed.jaxpr.outvars, outputs, strict=True)
    names |= {v: output for v, output in results if isinstance(v, Var)}
    return jaxprs.renamed(closed.jaxpr.eqns, names)


def taken_apart(traced: Traced, sizes: Iterable[int]) -> Apart:
    """Finds how edges, aux, the loss and the model state lie over the examples of a micro-batch.

    Args:
        traced: the layers on a whole micro-batch.
        sizes: the sizes of slices; the loss is traced at each and compared with the whole.

    Raises:
        CoupledError: the examples cannot be computed apart, or the loss or aux of the micro-batch
            cannot be made of the slices' results.
    """
    by_size = {size: _taken_apart(traced, size) for size in sorted(set(sizes))}
    least = min(by_size)
    for size, apart in by_size.items():
        if apart != by_size[least]:
            raise CoupledError(
                f"the loss is made of its examples in another way on {size} of them than on {least}: "
                "use micro-batches that the replicas of each stage divide evenly"
            )
    return by_size[least]


def _taken_apart(traced: Traced, fewer: int) -> Apart:
    """Finds the same as `taken_apart`, with slices of one size."""
    loss, small = traced.loss, _resized(traced, fewer)
    if comparable(loss.constants) != comparable(small.constants):
        raise CoupledError(
            f"the loss closes over arrays that are others on {fewer} examples than on {traced.graph.examples}: give "
            "them with the batch, or make them with jax.numpy"
        )
    spreading = _spreading(traced, fewer)
    spreading.run(loss.eqns, small.eqns)
    both = zip(loss.outputs, small.outputs, strict=True)
    outputs = {ref: spreading.lies(atom, other) for (atom, ref), (other, _) in both}
    atoms = {ref: atom for atom, ref in loss.outputs}
    # The user's choice of a reduction counts only if the trace cannot tell how an output is made.
    said = Said(traced.graph, outputs, atoms, spreading.normalizing)
    outputs = outputs | said.aux
    _check_outputs(traced, outputs)
    aux = [outputs[Ref(ValueKind.AUX, i)] for i in range(len(traced.graph.aux))]
    batching = Batching(
        tuple(map(_spread, _tensors(traced, spreading))),
        tuple(map(_spread, aux)),
        _spread(outputs[Ref(ValueKind.LOSS, 0)]),
        said.state,
    )
    return Apart(batching, said.plain(loss, spreading.amended))


def _spreading(traced: Traced, fewer: int) -> Spreading:
    """Returns the walk over a loss at two sizes; axis 0 of each batch leaf holds the examples."""
    loss = traced.loss
    states = loss.outputs_of(ValueKind.STATE)
    # Single examples may read a reduction over several examples only if the model state keeps it,
    # as it keeps the statistics of a batch norm.
    same = first_of_same(loss.eqns)
    remembered = reaching(loss.eqns, states)
    remembered |= {same.get(v, v) for v in remembered}
    total, flows = traced.graph.examples, active(loss)
    place_of = places(traced)
    spreading = Spreading(
        total,
        fewer,
        remembered,
        place_of,
        same=same,
        flows=flows,
    )
    batch = loss.inputs_of(ValueKind.BATCH)
    spreading.lies_of = dict.fromkeys(batch, Lies(Over.ALONG, 0))
    return spreading


def places(traced: Traced) -> Callable[[JaxprEqn], str]:
    """Returns a function that names the layer of an equation of the loss, for messages."""
    layer_of: dict[int, Layer] = {}
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        layer_of |= dict.fromkeys(map(id, body.eqns), layer)

    def place_of(eqn: JaxprEqn) -> str:
        layer = layer_of.get(id(eqn))
        return "the loss" if layer is None else f"layer {traced.graph.label(layer)}"

    return place_of


def _tensors(traced: Traced, spreading: Spreading) -> list[Lies]:
    """Returns how the edges between layers lie.

    Raises:
        CoupledError: slices would send another value than the whole micro-batch.
    """
    variables: dict[Ref, Atom] = {}
    for body in traced.bodies:
        variables |= zip(body.writes, body.outputs, strict=True)
    all_lies = []
    for i, tensor in enumerate(traced.graph.tensors):
        v = variables[Ref(ValueKind.TENSOR, i)]
        lies = spreading.lies_of.get(v, NONE) if isinstance(v, Var) else NONE
        if lies.over is Over.ALONG and lies.power:
            raise CoupledError(
                f"tensor '{tensor.array.name}' has a part for each example, scaled by the number of examples, so a "
                "slice makes other values: multiply or divide by that number in the loss, after a sum over examples"
            )
        all_lies.append(lies)
    return all_lies


def _spread(lies: Lies) -> Spread:
    return Spread(lies.over, lies.axis)


_LESS = " (weights that may add up to less than one take no max(weight, 1): give the sum itself)"


def _aux_path(traced: Traced, index: int) -> tuple[str, str]:
    """Returns the path of a leaf of aux twice: in JAX's notation, and as patterns name it."""
    group = aux_group(traced.graph, index)
    aux = jax.tree.unflatten(traced.loss.aux_tree, range(len(traced.graph.aux_groups)))
    path = jax.tree_util.tree_leaves_with_path(aux)[group][0]
    return f"leaf {jax.tree_util.keystr(path)}", path_name(path)


def _check_outputs(traced: Traced, outputs: dict[Ref, Lies]) -> None:
    """Checks that slices' results determine the loss and aux of a micro-batch.

    `Said` checks the model state.

    Raises:
        CoupledError: they do not determine the loss or a leaf of aux.
    """
    paired = [group for group in traced.graph.aux_groups if len(group) > 1]
    pairs = set(chain.from_iterable(paired))
    for ref, lies in outputs.items():
        match ref.kind:
            case ValueKind.LOSS:
                _check_loss(traced, lies)
            case ValueKind.AUX:
                _check_aux(
                    traced,
                    ref.index,
                    lies,
                    is_weighted=ref.index in pairs,
                )
            case ValueKind.STATE:
                pass
            case _:
                raise AssertionError(f"the loss does not yield {ref}")


def _check_loss(traced: Traced, lies: Lies) -> None:
    weighted = traced.loss.weighted
    fitting = {Over.SUM} if weighted else {Over.SUM, Over.MEAN}
    if lies.over in fitting and not lies.open:
        return
    sums = f"both parts sums over its examples{_LESS}"
    cure = sums if weighted else "a mean or a sum over its examples"
    raise CoupledError(
        f"the loss, which layer {traced.graph.label(traced.graph.layers[traced.graph.loss_layer])} "
        f"makes, cannot be made of those of slices, as replicas need it: it must be {cure}; a mean "
        "over a number of items that differs returns jvpipe.Weighted(total, weight). Else "
        "use one device for each stage, or make each stage a mesh with a batch_axis"
    )


def _check_aux(
    traced: Traced,
    index: int,
    lies: Lies,
    *,
    is_weighted: bool,
) -> None:
    is_known = lies.over is not Over.MIXED and not lies.open
    is_plain = lies.over is not Over.ALONG or not lies.power
    is_sum = lies.over is Over.SUM or not is_weighted
    if is_known and is_plain and is_sum:
        return
    leaf, path = _aux_path(traced, index)
    cure = "" if is_weighted else f"; or say how, as in aux_reduce={{'{path}': 'max'}}"
    raise CoupledError(
        f"{leaf} of aux cannot be made of those of slices, as replicas need it: return values of each "
        f"example, sums or means over them, or jvpipe.Weighted(total, weight){cure}"
    )
