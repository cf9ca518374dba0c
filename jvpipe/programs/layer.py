"""A layer as two programs: a forward that yields residuals, and a backward that reads them.

    program     takes                                             yields
    forward     inputs                                            outputs, residuals
    backward    sources, cotangents, partial sums, accumulators   accumulators, cotangents

A candidate is a value inside a layer whose fate can be chosen, such as the result of a product. The
residuals are the candidates that are kept, and a few values that are not candidates. The sources
are the inputs, outputs and residuals that the backward reads. A partial sum is the sum of the
cotangents that later layers have computed for an input of this layer. An accumulator is the sum of
a parameter's gradients.

In a layer's `Body`, `moving` are the inputs that gradients would flow to if no parameter were
frozen, and `active` marks the outputs that would then get cotangents. Given the frozen parameters,
`returned` marks the inputs whose gradients are used, and `received` the outputs that get
cotangents. `share` is the factor of the loss (`_cotangent`).

The layer runs under `jax.checkpoint` with a policy that saves the candidates to be kept. The
backward recomputes everything else. Results are bitwise identical for any choice of candidates, for
two reasons. Candidates and outputs are made by calls that are compiled alike in all programs (see
`jvpipe.programs.outline`), so a candidate is the same whether it was kept or recomputed. And every
candidate passes an optimization barrier, so the compiler never fuses it with its readers.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.ir.layers import Ref, Signature, Source
from jvpipe.ir.values import ValueKind
from jvpipe.programs.outline import outline
from jvpipe.programs.products import upright
from jvpipe.programs.split_backward import Halves, halve, settle_halves
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import Body, array_of
from jvpipe.trace.structure import comparable, structure


@dataclass(frozen=True)
class LayerPrograms:
    """Both programs of a layer for one choice of fates.

    Attributes:
        forward: `(inputs) -> (outputs, residuals)`.
        backward: `(sources, cotangents, partial sums, accumulators) -> (accumulators, cotangents of
            inputs)`.
        signature: for each argument and result of the backward, the number of the layer's input or
            output that it belongs to.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    signature: Signature

    @cached_property
    def recompute(self) -> ClosedJaxpr:
        """The forward for recomputing, which prints nothing, because the first run has printed."""
        return jaxprs.silent(self.forward)

    @cached_property
    def on_trial(self) -> "LayerPrograms":
        """The same programs for timing, with a backward that prints nothing."""
        backward = jaxprs.silent(self.backward)
        return self if backward is self.backward else replace(self, backward=backward)

    @cached_property
    def halves(self) -> Halves | None:
        """The backward as two programs; None if it yields only cotangents or only gradients."""
        return halve(self.backward, self.signature)

    @cached_property
    def key(self) -> Hashable:
        """A value that is equal for layers that can share both programs."""
        return (program_key(self.forward), program_key(self.backward), self.signature)


def program_key(closed: ClosedJaxpr) -> Hashable:
    """Returns a value that is equal for two jaxprs that compile to the same program."""
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    equations = structure(
        jaxpr.eqns,
        inputs,
        jaxpr.outvars,
        rules=False,
    )
    return equations, comparable(closed.consts)


def differentiate(
    body: Body,
    kept: Collection[str],
    partial: Collection[int],
) -> LayerPrograms:
    """Makes a layer's forward and backward.

    Args:
        body: the layer's equations.
        kept: the names of the candidates that the forward saves.
        partial: the ids of tensors that later layers read, too. The cotangents from those layers
            come in as partial sums, to which this layer adds its own.
    """
    summed = []
    for i in body.moving:
        ref = body.reads[i]
        if ref.kind == ValueKind.TENSOR and ref.index in partial:
            summed.append(i)
    # The traced forward yields everything that its derivative closes over. Which of these values
    # are residuals is found below.
    closed, tree = _trace_forward(body, kept, summed)
    n_out = len(body.outputs)
    results = closed.jaxpr.outvars
    outputs = results[:n_out]
    leaves = results[n_out:]
    sources = _sources(closed, n_out)
    shapes = [(sources[v], jaxprs.shape_of(v)) for v in leaves]
    calls = jaxprs.debug_calls(closed)
    backward, signature = _trace_backward(
        body,
        tree,
        shapes,
        summed,
        calls,
    )
    # The forward keeps only the residuals that the traced backward reads. The kept residuals get
    # new numbers, from 0.
    residuals = dict.fromkeys(v for v in leaves if sources[v][0] == "residual")
    used = [v for v in residuals if sources[v] in signature.sources]
    renumber: dict[Source, Source] = {}
    for i, v in enumerate(used):
        renumber[sources[v]] = ("residual", i)
    forward = jaxprs.yielding(closed, [*outputs, *used])
    # A residual that is not a candidate has no name of its own.
    names = _candidate_names(forward.jaxpr.eqns)
    arrays = [array_of(v, names.get(v, f"residual{i}")) for i, v in enumerate(used)]
    signature = replace(
        signature,
        residuals=tuple(arrays),
        sources=tuple(renumber.get(s, s) for s in signature.sources),
    )
    return LayerPrograms(forward, backward, signature)


def _candidate_names(eqns: Sequence[JaxprEqn]) -> dict[_jax.Atom, str]:
    """Returns the names of the candidates among the values of some equations.

    A value that `jax.checkpoint` saves passes through a `reduce_precision` that changes nothing;
    its result has the same name.
    """
    names: dict[_jax.Atom, str] = {}
    for eqn in eqns:
        if eqn.primitive.name == "name":
            names[eqn.outvars[0]] = str(eqn.params["name"])
        elif eqn.primitive.name == "reduce_precision" and eqn.invars[0] in names:
            names[eqn.outvars[0]] = names[eqn.invars[0]]
    return names


def inference(body: Body) -> ClosedJaxpr:
    """Returns the layer's forward without residuals, for evaluation."""
    return flatten(lambda *xs: _run(body, xs), *map(jaxprs.shape_of, body.inputs))


def _run(body: Body, inputs: Sequence[Any]) -> list[Any]:
    """Runs a layer; separately compiled calls compute the values of its candidates and outputs.

    Everything is computed twice: by the layer's equations, through which gradients flow, and by
    calls (see `outline`), which no gradient enters. A candidate or output takes its value from the
    call and its derivative from the equations. The compiler drops results that nobody reads.
    """
    env = dict(zip(body.inputs, inputs, strict=True))
    fixed = {v: jax.lax.stop_gradient(x) for v, x in env.items()}
    calls = outline(body)
    for position, eqn in enumerate(body.eqns):
        jaxprs.run_jaxpr([eqn], env)
        if eqn.effects:  # an equation with effects runs once, and calls read its results
            fixed |= {v: jax.lax.stop_gradient(env[v]) for v in eqn.outvars}
        elif position in calls:
            fixed |= calls[position](fixed)
        for v in eqn.outvars:
            if name := body.candidates.get(v):
                valued = _valued(env[v], fixed[v])
                env[v] = _candidate(valued, name)
                fixed[v] = jax.lax.stop_gradient(env[v])
    last = calls.get(len(body.eqns))
    if last:
        fixed |= last(fixed)
    results = []
    for v in body.outputs:
        if isinstance(v, _jax.Literal):
            results.append(v.val)
        else:
            results.append(_valued(env[v], fixed[v]))
    return results


# Has the value of the second argument and the derivative of the first. Both arguments are the same
# value except for roundings.
_valued = jax.custom_jvp(lambda differentiable, value: value)
_valued.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def _candidate(x: jax.Array, name: str) -> jax.Array:
    """Returns a value that can be saved under a name.

    A complex value is saved as its real and its imaginary part, because JAX saves no complex ones.
    """
    if not jnp.iscomplexobj(x):
        return checkpoint_name(jax.lax.optimization_barrier(x), name)
    stacked = jnp.stack([x.real, x.imag])
    parts = checkpoint_name(jax.lax.optimization_barrier(stacked), name)
    return jax.lax.complex(parts[0], parts[1])


def _trace_forward(
    body: Body,
    kept: Collection[str],
    summed: Sequence[int],
) -> tuple[ClosedJaxpr, Any]:
    """Traces the forward; its outputs include every value that the backward closes over.

    The `summed` inputs are passed on as outputs, too. Such an output's cotangent is the partial sum
    from later layers. The derivative adds this layer's own cotangents to that sum. If the later
    layers were part of this one, the derivative would add in the same order. So the order does not
    depend on where layers are cut.

    Args:
        body: the layer's equations.
        kept: the names of the candidates that are saved.
        summed: inputs whose cotangents come in as partial sums.

    Returns:
        The forward, and the tree that rebuilds the backward from the values that it closes over.
    """
    trees = []  # a traced function returns only arrays, so it leaves the tree here
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    def forward(*xs: Any) -> list[Any]:
        def run(*ys: Any) -> tuple[list[Any], list[Any]]:
            return _run(body, ys), [ys[i] for i in summed]

        def pick(*variable: Any) -> tuple[list[Any], list[Any]]:
            merged = list(xs)
            for i, x in zip(body.moving, variable, strict=True):
                merged[i] = x
            out, passed = jax.checkpoint(run, policy=policy, prevent_cse=False)(*merged)
            active = [x for x, a in zip(out, body.active, strict=True) if a]
            return [*active, *passed], out

        # `pull` is a pytree. Its leaves are the values that it closes over, and become outputs of
        # the forward.
        _, pull, out = jax.vjp(
            pick,
            *(xs[i] for i in body.moving),
            has_aux=True,
        )
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return [*out, *leaves]

    closed = flatten(forward, *map(jaxprs.shape_of, body.inputs))
    return closed, trees[-1]


def _sources(closed: ClosedJaxpr, n_out: int) -> dict[_jax.Atom, Source]:
    """Returns where the backward finds each value that the traced forward yields.

    An input or output of the layer has a buffer already, so the forward need not leave it again.
    """
    results = closed.jaxpr.outvars
    outputs = results[:n_out]
    leaves = results[n_out:]
    # The first of equal outputs counts, so it is assigned last (`reversed`). An output that is also
    # an input counts as an input, so inputs are assigned after all outputs.
    sources: dict[_jax.Atom, Source] = {}
    for i, v in reversed(list(enumerate(outputs))):
        if not isinstance(v, _jax.Literal):
            sources[v] = ("output", i)
    for i, v in enumerate(closed.jaxpr.invars):
        sources[v] = ("input", i)
    residuals = dict.fromkeys(v for v in leaves if v not in sources)
    for i, v in enumerate(residuals):
        sources[v] = ("residual", i)
    return sources


_LOSS = Ref(ValueKind.LOSS, 0)


def _trace_backward(
    body: Body,
    tree: Any,
    leaves: Sequence[tuple[Source, Any]],
    summed: Sequence[int],
    printed: Collection[Hashable],
) -> tuple[ClosedJaxpr, Signature]:
    """Traces the backward, with all gradients and cotangents that it could yield.

    The backward is traced as if no parameter were frozen. If later layers yield no partial
    sum for an input, because its cotangent is not needed, zeros take the place of that sum.
    Unneeded results are removed only after the steps that decide how the compiler rounds.
    So freezing a parameter does not change how the other gradients are rounded.

    Args:
        body: the layer's equations.
        tree: rebuilds the backward from the leaves.
        leaves: the values that the forward has left, each with where it is found.
        summed: inputs whose cotangents come in as partial sums.
        printed: the `jax.debug` calls that the forward runs, including any inside derivative rules.
            The backward leaves these calls out.
    """
    kinds = [ref.kind for ref in body.reads]
    gradients = [i for i in body.moving if kinds[i] is ValueKind.PARAMETER]
    returned = [i for i in body.moving if kinds[i] is ValueKind.TENSOR]
    active_outputs = [i for i, a in enumerate(body.active) if a]
    # The active outputs whose cotangents come from later layers.
    taken = [i for i in active_outputs if body.received[i] and body.writes[i] != _LOSS]
    partial = [i for i in summed if body.returned[i]]
    shapes = dict(leaves)

    def backward(
        left: list[Any],
        cotangents: list[Any],
        sums: list[Any],
        accumulators: list[Any],
    ) -> list[Any]:
        value = dict(zip(shapes, left, strict=True))
        pull = jax.tree.unflatten(tree, [value[source] for source, _ in leaves])
        incoming = {i: _cotangent(body, i) for i in active_outputs}
        incoming |= zip(taken, cotangents, strict=True)
        later = {i: _zeros(body.inputs[i]) for i in summed}
        later |= zip(partial, sums, strict=True)
        # The order is that of the results of `pick`: active outputs, then summed inputs.
        active = [incoming[i] for i in active_outputs]
        pulled = pull([*active, *later.values()])
        moved = dict(zip(body.moving, pulled, strict=True))
        sums_now = [acc + moved[i] for i, acc in zip(gradients, accumulators, strict=True)]
        return [*sums_now, *(moved[i] for i in returned)]

    input_shapes = list(map(jaxprs.shape_of, body.inputs))
    flat = flatten(
        backward,
        list(shapes.values()),
        [jaxprs.shape_of(body.outputs[i]) for i in taken],
        [input_shapes[i] for i in partial],
        [input_shapes[i] for i in gradients],
    )
    # First the steps that decide how the compiler rounds, then those that only leave results out.
    quiet = jaxprs.silent(flat, printed)
    closed = settle_halves(upright(quiet), len(gradients))
    results = zip((*gradients, *returned), closed.jaxpr.outvars, strict=True)
    closed = jaxprs.yielding(closed, [x for i, x in results if body.returned[i]])
    closed, sources = _without_unread(
        closed,
        body,
        list(shapes),
        gradients,
    )
    read_gradients = [i for i in gradients if body.returned[i]]
    read_cotangents = [i for i in returned if body.returned[i]]
    signature = Signature(
        residuals=(),
        sources=tuple(sources),
        cotangents=tuple(taken),
        partial=tuple(partial),
        gradients=tuple(read_gradients),
        returned=tuple(read_cotangents),
    )
    return closed, signature


def _without_unread(
    closed: ClosedJaxpr,
    body: Body,
    sources: Sequence[Source],
    gradients: Sequence[int],
) -> tuple[ClosedJaxpr, list[Source]]:
    """Drops the inputs that a backward does not read: sources, and sums for frozen parameters.

    Args:
        closed: the backward; its inputs begin with the sources and end with the sums of gradients.
        body: the layer's equations.
        sources: where the backward finds the values that the forward has left.
        gradients: the parameters to which the sums of gradients belong.

    Returns:
        The backward, and the sources that are left.
    """
    inputs = closed.jaxpr.invars
    read = jaxprs.all_reads(closed.jaxpr.eqns, closed.jaxpr.outvars)
    dropped = set(inputs[: len(sources)]) - read
    sums = inputs[len(inputs) - len(gradients) :]
    for v, i in zip(sums, gradients, strict=True):
        if not body.returned[i]:
            dropped.add(v)
    assert dropped.isdisjoint(read), "the sum of a frozen parameter's gradients is read"
    left = [source for source, v in zip(sources, inputs, strict=False) if v not in dropped]
    jaxpr = closed.jaxpr.replace(invars=[v for v in inputs if v not in dropped])
    return ClosedJaxpr(jaxpr, closed.consts), left


def _cotangent(body: Body, i: int) -> jax.Array:
    """Returns the cotangent of an output to which no later layer sends one.

    For the loss it is `body.share`, the factor with which this slice's loss counts in the loss of
    the whole micro-batch. A slice is the part of a micro-batch that one replica of a stage has.
    Without slices, the factor is 1. For other outputs the cotangent is zeros.
    """
    output = body.outputs[i]
    if body.writes[i] == _LOSS:
        return jnp.full(
            (),
            body.share,
            _jax.aval(output).dtype,
        )
    return _zeros(output)


def _zeros(atom: _jax.Atom) -> jax.Array:
    aval = _jax.aval(atom)
    return jnp.zeros(aval.shape, aval.dtype)
