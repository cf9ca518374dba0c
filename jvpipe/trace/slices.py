"""A loss on slices of a micro-batch, as the replicas of a stage compute it, in the layers of the whole.

It is traced at the size of each slice. A mean counts as much as its share of the examples. Random numbers and positions
are those of the whole micro-batch, of which each slice takes its own: dropout draws the same masks for any number of
replicas (and every replica draws them all).
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.layers import LayerGraph, Ref
from jvpipe.ir.paths import path_name
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import Body, Traced, build_graph
from jvpipe.trace.loss import LossJaxpr, active
from jvpipe.trace.normalised import first_of_same
from jvpipe.trace.one_example import UnlikeError, on_one
from jvpipe.trace.reductions import NONE, Beside, Lies
from jvpipe.trace.said import Said, aux_group
from jvpipe.trace.spread import GENERATORS, CoupledError, Spreading, reaching
from jvpipe.trace.structure import comparable

_LOOPS = ("scan", "while", "cond", "jit", "pjit", "closed_call", "checkpoint", "remat2", "remat")
"""What is written anew for a slice, with what is inside."""


@dataclass(frozen=True)
class Apart:
    """What is known of a loss whose examples can be computed apart.

    `amended` are the equations, by their identity, that slices compute in another way.
    """

    batching: Batching
    amended: Mapping[int, Beside]


def sliced(traced: Traced, examples: Examples, apart: Apart) -> Traced:
    """The same layers on some of the examples.

    Args:
        traced: the layers on a whole micro-batch.
        examples: of it.
        apart: what was found of them.

    Raises:
        CoupledError: the loss is another one at that size.
    """
    loss = replace(_resized(traced, examples.size), frozen=traced.loss.frozen)
    made = build_graph(loss, traced.cuts, traced.splits)
    if _layers(made.graph) != _layers(traced.graph):
        raise CoupledError(
            f"the loss on {examples.size} examples is not made of the layers that it has on {traced.graph.examples}: "
            "use larger micro-batches or fewer replicas, so that each has at least 2 examples"
        )
    cut = _Cut(examples, traced.graph.examples, apart)
    bodies = tuple(
        cut.body(whole, part) for whole, part in zip(traced.bodies, made.bodies, strict=True)
    )
    return replace(made, bodies=bodies)


def _resized(traced: Traced, examples: int) -> LossJaxpr:
    """The loss on another number of examples."""
    loss = traced.loss
    assert loss.of_size is not None, "a loss that was not traced from a function"
    if examples == 1:
        try:
            return on_one(loss, traced.graph.examples)
        except UnlikeError:
            pass  # it is as JAX traces it
    try:
        return loss.of_size(examples)
    except Exception as error:
        raise CoupledError(
            f"the loss does not take {examples} examples, which is what a replica has: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _layers(graph: LayerGraph) -> object:
    """What must be alike for layers to be the same but for their sizes."""
    layers = [
        (layer.reads, layer.writes, [c.name for c in layer.candidates]) for layer in graph.layers
    ]
    tensors = [(tensor.producer, tensor.readers, tensor.differentiable) for tensor in graph.tensors]
    return layers, tensors, [parameter.readers for parameter in graph.parameters]


@dataclass(frozen=True)
class _Cut:
    """What makes of the layers on a whole micro-batch those on some of its examples."""

    examples: Examples
    of: int
    apart: Apart

    @property
    def share(self) -> float:
        """How much the slice is of a micro-batch."""
        return self.examples.size / self.of

    def body(self, whole: Body, part: Body) -> Body:
        """A layer on a slice: what it draws is cut out of what the whole layer draws."""
        eqns = self._equations(whole.eqns, part.eqns)
        is_mean = (
            self.apart.batching.loss.over is Over.MEAN and Ref(ValueKind.LOSS, 0) in part.writes
        )
        return replace(part, eqns=tuple(eqns), share=self.share if is_mean else 1.0)

    def _equations(self, whole: Sequence[JaxprEqn], part: Sequence[JaxprEqn]) -> Sequence[JaxprEqn]:
        """The equations of a slice, also of a loop.

        Args:
            whole: of the whole micro-batch.
            part: as they were traced at the size of the slice.
        """
        eqns: list[JaxprEqn] = []
        for eqn, own in zip(whole, part, strict=True):
            if eqn.primitive.name in GENERATORS:
                eqns += self._generated(eqn, own)
            elif eqn.primitive.name in _LOOPS:
                params = {k: self._inside(v, own.params[k]) for k, v in eqn.params.items()}
                eqns.append(own.replace(params=own.params | params))
            else:
                beside, is_first = self.apart.amended.get(id(eqn)), self.examples.start == 0
                eqns += _amended(own, beside, self.share, is_first=is_first)
        return eqns

    def _inside(self, whole: Any, own: Any) -> Any:
        """A parameter of a loop or call, whose bodies draw numbers too.

        Args:
            whole: of the whole micro-batch.
            own: of the slice.
        """
        match own:
            case ClosedJaxpr():
                return ClosedJaxpr(self._inside(whole.jaxpr, own.jaxpr), own.consts)
            case Jaxpr():
                return own.replace(eqns=list(self._equations(whole.eqns, own.eqns)))
            case tuple():
                parts = [self._inside(a, b) for a, b in zip(whole, own, strict=True)]
                return own if all(map(operator.is_, parts, own)) else tuple(parts)
            case _:
                return own

    def _generated(self, whole: JaxprEqn, own: JaxprEqn) -> Sequence[JaxprEqn]:
        """Numbers by their position: those of the whole micro-batch, then the part that is wanted."""
        aval, wanted = _jax.aval(whole.outvars[0]), _jax.aval(own.outvars[0])
        inputs = [
            _jax.aval(a).shape == _jax.aval(b).shape
            for a, b in zip(whole.invars, own.invars, strict=True)
        ]
        axes = [i for i, (a, b) in enumerate(zip(aval.shape, wanted.shape, strict=True)) if a != b]
        if not axes or not all(inputs):
            return [own]
        (axis,) = axes
        rows = aval.shape[axis] // self.of
        start, stop = self.examples.start * rows, self.examples.stop * rows
        drawn = _jax.new_variable(aval)
        cut = _equations(
            lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), [drawn], own.outvars
        )
        return [whole.replace(invars=own.invars, outvars=[drawn]), *cut]


def _amended(
    own: JaxprEqn, beside: Beside | None, share: float, *, is_first: bool
) -> Sequence[JaxprEqn]:
    """An equation of a slice, one of whose operands counts by the slice's share, or must not be zero.

    Args:
        own: the equation.
        beside: the operand, and how it is computed with.
        share: of the slice in the micro-batch.
        is_first: whether the slice is the first one.
    """
    only_first = beside in (Beside.FIRST_LEFT, Beside.FIRST_RIGHT)
    if beside is None or (only_first and is_first):
        return [own]
    if beside is Beside.GUARD:
        (count,) = jaxprs.variables(own.invars)
        return [own.replace(invars=[count, count])]
    if beside is Beside.DIVISOR:
        return _equations(_quotient, own.invars, own.outvars)
    side = 0 if beside in (Beside.LEFT, Beside.FIRST_LEFT) else 1
    operand, made = own.invars[side], _jax.new_variable(_jax.aval(own.invars[side]))

    def changed(x: jax.Array) -> jax.Array:
        if only_first:  # nothing, in one equation: zeros would be none, but a constant
            return jax.lax.clamp(jnp.zeros((), x.dtype), x, jnp.zeros((), x.dtype))
        return x * jnp.asarray(share, x.dtype)

    invars = [made if i == side else atom for i, atom in enumerate(own.invars)]
    return [*_equations(changed, [operand], [made]), own.replace(invars=invars)]


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    """A sum by a count, nothing where both are; NaN where the count alone is, which no derivative reads."""
    quotient = total / jnp.where(count == 0, jnp.ones_like(count), count)
    lost = (count == 0) & (jax.lax.stop_gradient(total) != 0)
    return quotient + jnp.where(lost, jnp.asarray(jnp.nan, total.dtype), jnp.zeros_like(total))


def _equations(
    fn: Callable[..., jax.Array], inputs: Sequence[Atom], outputs: Sequence[Var]
) -> Sequence[JaxprEqn]:
    """The equations of a function between variables.

    Args:
        fn: of arrays.
        inputs: what it takes.
        outputs: what it yields.
    """
    shapes = [jax.ShapeDtypeStruct(_jax.aval(x).shape, _jax.aval(x).dtype) for x in inputs]
    closed = flatten(fn, *shapes)
    names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    names |= {
        v: o for v, o in zip(closed.jaxpr.outvars, outputs, strict=True) if isinstance(v, Var)
    }
    return [
        eqn.replace(
            invars=[names.get(x, x) if isinstance(x, Var) else x for x in eqn.invars],
            outvars=[names.get(x, x) for x in eqn.outvars],
        )
        for eqn in closed.jaxpr.eqns
    ]


def taken_apart(traced: Traced, sizes: Iterable[int]) -> Apart:
    """Finds how edges, aux and the loss lie over the examples of a micro-batch.

    Args:
        traced: the layers on a whole one.
        sizes: of its slices, to compare with.

    Raises:
        CoupledError: its examples cannot be computed apart, or its loss or aux not be made of those of slices.
    """
    found = {size: _taken_apart(traced, size) for size in sorted(set(sizes))}
    least = min(found)
    for size, apart in found.items():
        if apart != found[least]:
            raise CoupledError(
                f"the loss is made of its examples in another way on {size} of them than on {least}: "
                "use micro-batches that the replicas of each stage divide evenly"
            )
    return found[least]


def _taken_apart(traced: Traced, fewer: int) -> Apart:
    """The same, compared with one smaller number of examples."""
    loss, small = traced.loss, _resized(traced, fewer)
    if comparable(loss.constants) != comparable(small.constants):
        raise CoupledError(
            f"the loss closes over arrays that are others on {fewer} examples than on {traced.graph.examples}: give "
            "them with the batch, or make them with jax.numpy"
        )
    states = [atom for atom, ref in loss.outputs if ref.kind is ValueKind.STATE]
    layer_of = {
        id(eqn): layer
        for layer, body in zip(traced.graph.layers, traced.bodies, strict=True)
        for eqn in body.eqns
    }

    def place_of(eqn: JaxprEqn) -> str:
        layer = layer_of.get(id(eqn))
        return "the loss" if layer is None else f"layer {traced.graph.label(layer)}"

    same, remembered = first_of_same(loss.eqns), reaching(loss.eqns, states)
    remembered |= {same.get(v, v) for v in remembered}
    spreading = Spreading(
        traced.graph.examples, fewer, remembered, place_of, same=same, flows=active(loss)
    )
    spreading.known = {
        v: Lies(Over.ALONG, 0) for v, ref in loss.inputs.items() if ref.kind is ValueKind.BATCH
    }
    spreading.run(loss.eqns, small.eqns)
    outputs = {
        ref: spreading.lies(atom, other)
        for (atom, ref), (other, _) in zip(loss.outputs, small.outputs, strict=True)
    }
    atoms = {ref: atom for atom, ref in loss.outputs}
    said = Said(traced.graph, outputs, atoms, spreading.normalising)
    outputs = outputs | said.aux
    _check_outputs(traced, outputs)
    variables = {
        ref: v for body in traced.bodies for v, ref in zip(body.outputs, body.writes, strict=True)
    }
    tensors = [variables[Ref(ValueKind.TENSOR, i)] for i in range(len(traced.graph.tensors))]
    known = [spreading.known.get(v, NONE) if isinstance(v, _jax.Var) else NONE for v in tensors]
    for tensor, lies in zip(traced.graph.tensors, known, strict=True):
        if lies.over is Over.ALONG and lies.power:
            raise CoupledError(
                f"tensor '{tensor.array.name}' has a part for each example that the number of examples is a factor of, "
                "so that slices make another: multiply or divide by that number in the loss, after a sum over examples"
            )
    aux = [outputs[Ref(ValueKind.AUX, i)] for i in range(len(traced.graph.aux))]
    batching = Batching(
        tuple(map(_spread, known)),
        tuple(map(_spread, aux)),
        _spread(outputs[Ref(ValueKind.LOSS, 0)]),
        said.state,
    )
    return Apart(batching, said.plain(loss, spreading.amended))


def _spread(lies: Lies) -> Spread:
    return Spread(lies.over, lies.axis)


_LESS = " (weights that may add up to less than one take no max(weight, 1): give the sum itself)"


def _aux_path(traced: Traced, index: int) -> tuple[str, str]:
    """The path of a leaf of aux, as JAX writes it and as patterns do."""
    group = aux_group(traced.graph, index)
    aux = jax.tree.unflatten(traced.loss.aux_tree, range(len(traced.graph.aux_groups)))
    path = jax.tree_util.tree_leaves_with_path(aux)[group][0]
    return f"leaf {jax.tree_util.keystr(path)}", path_name(path)


def _check_outputs(traced: Traced, outputs: dict[Ref, Lies]) -> None:
    """Raises unless the loss, the aux and the model state of a micro-batch can be made of those of its slices."""
    weighted = traced.loss.weighted
    wanted = {Over.SUM} if weighted else {Over.SUM, Over.MEAN}
    cure = (
        f"both parts sums over its examples{_LESS}"
        if weighted
        else "a mean or a sum over its examples"
    )
    pairs = {i for group in traced.graph.aux_groups if len(group) > 1 for i in group}
    for ref, lies in outputs.items():
        match ref.kind:
            case ValueKind.LOSS:
                if lies.over not in wanted or lies.open:
                    raise CoupledError(
                        f"the loss, which layer {traced.graph.label(traced.graph.layers[traced.graph.loss_layer])} "
                        f"makes, cannot be made of those of slices, as replicas need it: it must be {cure}; a mean "
                        "over a number of items that differs returns jvpipe.Weighted(total, weight). Else "
                        "use one device for each stage, or make each stage a mesh with a batch_axis"
                    )
            case ValueKind.AUX:
                if (
                    lies.over is Over.MIXED
                    or lies.open
                    or (lies.over is Over.ALONG and lies.power)
                    or (ref.index in pairs and lies.over is not Over.SUM)
                ):
                    leaf, path = _aux_path(traced, ref.index)
                    cure = (
                        ""
                        if ref.index in pairs
                        else f"; or say how, as in aux_reduce={{'{path}': 'max'}}"
                    )
                    raise CoupledError(
                        f"{leaf} of aux cannot be made of those of slices, as replicas need it: return values of each "
                        f"example, sums or means over them, or jvpipe.Weighted(total, weight){cure}"
                    )
            case ValueKind.STATE:
                pass  # `Said.state` has looked at it
            case _:
                raise AssertionError(f"the loss does not yield {ref}")
