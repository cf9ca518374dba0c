"""A layer as two programs: a forward that yields residuals, and a backward that reads them.

    program     takes                                             yields
    forward     inputs                                            outputs, residuals
    backward    sources, cotangents, partial sums, accumulators   accumulators, cotangents

A candidate is a value inside a layer that can be kept, swapped or recomputed, such as the result of
a product. The residuals are the candidates that the forward saves, and a few values that are not
candidates. The sources are the inputs, outputs and residuals that the backward reads. A partial sum
is the sum of the cotangents that later layers have computed for an input of this layer. An
accumulator is the sum of a parameter's gradients.

In a layer's `Body`, `moving` are the inputs that gradients would flow to if no parameter were
frozen, and `active` marks the outputs that would then get cotangents. Given the frozen parameters,
`returned` marks the inputs whose gradients are used, and `received` the outputs that get
cotangents. `share` is the factor by which the loss on a replica's slice counts in the loss of the
micro-batch.

The layer runs under `jax.checkpoint` with a policy that saves the chosen candidates. The backward
(`jvpipe.programs.layer_backward`) recomputes everything else. Results are bitwise identical for any
choice of candidates, because a candidate has the same value whether it is saved or recomputed
(`jvpipe.programs.layer_values`).
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.ir.layers import Signature, Source
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer_backward import trace_backward
from jvpipe.programs.layer_values import run_layer
from jvpipe.programs.split_backward import Halves, halve
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import array_of
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
        """The forward without its `jax.debug` calls, for running it a second time."""
        return jaxprs.silent(self.forward)

    @cached_property
    def on_trial(self) -> "LayerPrograms":
        """The same programs for timing, with a backward without `jax.debug` calls."""
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
        partial: the ids of the inputs that later layers also read. The cotangents from those layers
            come in as partial sums, to which this layer adds its own.
    """
    summed = []
    for i in body.moving:
        ref = body.reads[i]
        if ref.kind == ValueKind.TENSOR and ref.index in partial:
            summed.append(i)
    # The traced forward yields everything that its derivative closes over. The code below selects
    # the residuals among these values.
    closed, tree = _trace_forward(body, kept, summed)
    n_out = len(body.outputs)
    results = closed.jaxpr.outvars
    outputs = results[:n_out]
    leaves = results[n_out:]
    sources = _sources(closed, n_out)
    shapes = [(sources[v], jaxprs.shape_of(v)) for v in leaves]
    calls = jaxprs.debug_calls(closed)
    backward, signature = trace_backward(
        body,
        tree,
        shapes,
        summed,
        calls,
    )
    # The forward yields only the residuals that the traced backward reads, numbered from 0.
    residuals = dict.fromkeys(v for v in leaves if sources[v][0] == "residual")
    used = [v for v in residuals if sources[v] in signature.sources]
    renumber: dict[Source, Source] = {}
    for i, v in enumerate(used):
        renumber[sources[v]] = ("residual", i)
    forward = jaxprs.yielding(closed, [*outputs, *used])
    # A residual that is not a candidate has no name yet.
    names = _candidate_names(forward.jaxpr.eqns)
    arrays = []
    for i, v in enumerate(used):
        name = names.get(v, f"residual{i}")
        arrays.append(array_of(v, name))
    signature = replace(
        signature,
        residuals=tuple(arrays),
        sources=tuple(renumber.get(s, s) for s in signature.sources),
    )
    return LayerPrograms(forward, backward, signature)


def _candidate_names(eqns: Sequence[JaxprEqn]) -> dict[_jax.Atom, str]:
    """Returns the names of the candidates among the values of some equations.

    A value that `jax.checkpoint` saves passes through a `reduce_precision` that changes nothing.
    The result of this equation gets the same name.
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
    shapes = map(jaxprs.shape_of, body.inputs)
    return flatten(lambda *xs: run_layer(body, xs), *shapes)


def _trace_forward(
    body: Body,
    kept: Collection[str],
    summed: Sequence[int],
) -> tuple[ClosedJaxpr, Any]:
    """Traces the forward; its outputs include every value that the backward closes over.

    The `summed` inputs are passed on as additional outputs. The cotangent of such an output is the
    partial sum from later layers, to which the derivative adds this layer's own cotangents. If the
    later layers were part of this one, the derivative would add in the same order. So the order
    does not depend on where layers are cut.

    Args:
        body: the layer's equations.
        kept: the names of the candidates that are saved.
        summed: inputs whose cotangents come in as partial sums.

    Returns:
        The forward, and the tree that rebuilds the backward from the values that it closes over.
    """
    trees = []  # `forward` appends the tree here, because a traced function returns only arrays
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    def forward(*xs: Any) -> list[Any]:
        def run(*ys: Any) -> tuple[list[Any], list[Any]]:
            return run_layer(body, ys), [ys[i] for i in summed]

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
    """Returns the source from which the backward reads each value that the traced forward yields.

    An input or output of the layer already has a buffer, so it need not become a residual.
    """
    results = closed.jaxpr.outvars
    outputs = results[:n_out]
    leaves = results[n_out:]
    # Later assignments win. Among equal outputs the first one is the source, so outputs are
    # assigned in reverse order. An output that is also an input counts as an input.
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
