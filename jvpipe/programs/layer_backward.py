"""A layer's backward, which is traced with all its results and then loses the unneeded ones.

The whole backward has all gradients and cotangents, as if no parameter were frozen. If later layers
yield no partial sum for an input, because its cotangent is not needed, zeros replace that sum.
Unneeded results are removed only after the steps that decide how the compiler rounds. So freezing a
parameter does not change how the other gradients are rounded.

The docstring of `jvpipe.programs.layer` defines the terms of this file.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.ir.layers import Ref, Signature, Source
from jvpipe.ir.values import ValueKind
from jvpipe.programs.products import upright
from jvpipe.programs.split_backward import settle_halves
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.flatten import flatten

_LOSS = Ref(ValueKind.LOSS, 0)


def trace_backward(
    body: Body,
    tree: Any,
    leaves: Sequence[tuple[Source, Any]],
    summed: Sequence[int],
    printed: Collection[Hashable],
) -> tuple[ClosedJaxpr, Signature]:
    """Traces a layer's backward, and removes the unneeded results.

    Args:
        body: the layer's equations.
        tree: rebuilds the derivative from the leaves.
        leaves: the source and the shape of each value that the derivative closes over.
        summed: inputs whose cotangents come in as partial sums.
        printed: the `jax.debug` calls that the forward runs, including any inside derivative rules.
            The backward leaves these calls out.
    """
    roles = _Roles.of(body, summed)
    whole = _whole_backward(body, roles, tree, leaves)
    # The steps that decide how the compiler rounds come first. The later ones only drop results.
    quiet = jaxprs.silent(whole, printed)
    closed = settle_halves(upright(quiet), len(roles.parameters))
    inputs = (*roles.parameters, *roles.tensors)
    results = zip(inputs, closed.jaxpr.outvars, strict=True)
    closed = jaxprs.yielding(closed, [x for i, x in results if body.returned[i]])
    closed, sources = _without_unread(
        closed,
        body,
        list(dict(leaves)),
        roles.parameters,
    )
    signature = Signature(
        residuals=(),
        sources=tuple(sources),
        cotangents=roles.taken,
        partial=roles.partial,
        gradients=tuple(i for i in roles.parameters if body.returned[i]),
        returned=tuple(i for i in roles.tensors if body.returned[i]),
    )
    return closed, signature


@dataclass(frozen=True)
class _Roles:
    """The numbers of a layer's inputs and outputs, by their role in the whole backward.

    Attributes:
        parameters: the inputs with gradients.
        tensors: the inputs with cotangents.
        summed: the inputs whose cotangents later layers have begun to sum.
        partial: the inputs of `summed` whose partial sums are arguments; the others get zeros.
        active: the outputs with cotangents.
        taken: the outputs of `active` whose cotangents are arguments; `_cotangent` makes the rest.
    """

    parameters: tuple[int, ...]
    tensors: tuple[int, ...]
    summed: tuple[int, ...]
    partial: tuple[int, ...]
    active: tuple[int, ...]
    taken: tuple[int, ...]

    @staticmethod
    def of(body: Body, summed: Sequence[int]) -> "_Roles":
        """Sorts the inputs and outputs of a layer by role; `summed` are numbers of inputs."""
        kinds = [ref.kind for ref in body.reads]
        active = [i for i, is_active in enumerate(body.active) if is_active]
        from_later = [i for i in active if body.received[i] and body.writes[i] != _LOSS]
        return _Roles(
            parameters=tuple(i for i in body.moving if kinds[i] is ValueKind.PARAMETER),
            tensors=tuple(i for i in body.moving if kinds[i] is ValueKind.TENSOR),
            summed=tuple(summed),
            partial=tuple(i for i in summed if body.returned[i]),
            active=tuple(active),
            taken=tuple(from_later),
        )


def _whole_backward(
    body: Body,
    roles: _Roles,
    tree: Any,
    leaves: Sequence[tuple[Source, Any]],
) -> ClosedJaxpr:
    """Traces the backward with all gradients and cotangents, as if no parameter were frozen.

    Args:
        body: the layer's equations.
        roles: the roles of the layer's inputs and outputs.
        tree: rebuilds the derivative from the leaves.
        leaves: the source and the shape of each value that the derivative closes over.
    """
    shapes = dict(leaves)

    def backward(
        left: list[Any],
        cotangents: list[Any],
        sums: list[Any],
        accumulators: list[Any],
    ) -> list[Any]:
        """Returns the new sums of gradients, and then the cotangents of the layer's tensors.

        Args:
            left: the values that the forward has left, in the order of `leaves`, each once.
            cotangents: those of the outputs `taken`.
            sums: the sums of cotangents that later layers have begun, for the inputs `partial`.
            accumulators: the sums of gradients so far; a gradient has its parameter's shape.
        """
        value = dict(zip(shapes, left, strict=True))
        pull = jax.tree.unflatten(tree, [value[source] for source, _ in leaves])
        incoming = {i: _cotangent(body, i) for i in roles.active}
        incoming |= zip(roles.taken, cotangents, strict=True)
        later = {i: _zeros(body.inputs[i]) for i in roles.summed}
        later |= zip(roles.partial, sums, strict=True)
        # The order is that of the derived function's results: active outputs, then summed inputs.
        pulled = pull([*incoming.values(), *later.values()])
        moved = dict(zip(body.moving, pulled, strict=True))
        pairs = zip(roles.parameters, accumulators, strict=True)
        new_sums = [accumulator + moved[i] for i, accumulator in pairs]
        return [*new_sums, *(moved[i] for i in roles.tensors)]

    input_shapes = list(map(jaxprs.shape_of, body.inputs))
    return flatten(
        backward,
        list(shapes.values()),
        [jaxprs.shape_of(body.outputs[i]) for i in roles.taken],
        [input_shapes[i] for i in roles.partial],
        [input_shapes[i] for i in roles.parameters],
    )


def _without_unread(
    closed: ClosedJaxpr,
    body: Body,
    sources: Sequence[Source],
    gradients: Sequence[int],
) -> tuple[ClosedJaxpr, list[Source]]:
    """Drops the sources that a backward does not read, and the sums for frozen parameters.

    Args:
        closed: the backward; its inputs begin with the sources and end with the sums of gradients.
        body: the layer's equations.
        sources: the sources of the values that the derivative closes over.
        gradients: the inputs of the layer to which the sums of gradients belong.

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
    """Returns the cotangent of an output that gets none from later layers.

    The cotangent of the loss is `body.share`, the factor by which this slice's loss counts in the
    loss of the whole micro-batch. A slice is the part of a micro-batch that one replica of a stage
    computes. Without slices, the factor is 1. The cotangents of other outputs are zeros.
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
