"""Layers cut in two, where one of them is too large a part of a stage.

A layer is cut right before a product, if products are left on both sides. There a half hands on what XLA writes to
memory anyway (the operands of a product, and in the backward the product that is their cotangent), so that two programs
can be bitwise identical with one; `programs.bit_equality` says whether they are. No parameter is read on both sides: it
would have two gradients, summed in another order. Only the layer itself is looked at, so layers that are alike are cut
alike, and no other layer changes.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import pairwise

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.graph import Body, Sorted, Traced, build_graph
from jvpipe.trace.primitives import flops
from jvpipe.trace.sums import parameters_behind

Seconds = Callable[[Sequence[JaxprEqn], Sequence[Atom]], Sequence[float]]
"""Returns how long each of some equations takes, if they make some outputs."""

_EVEN = 0.05
"""Cuts are alike if their slower halves differ by less than this share of the layer: then the fewest bytes decide."""


def layer_signature(body: Body) -> Hashable:
    """Returns a value that is equal for layers that are alike."""
    return body.structure, body.differentiable, body.active, body.returned, body.received


def split_points(traced: Traced, layer: int, seconds: Seconds) -> list[int]:
    """Returns the points at which a layer can be cut in two, in equations before its end; the most even halves first.

    Args:
        traced: the model.
        layer: to be cut.
        seconds: of each equation, of those that make some outputs.

    >>> import jax, jax.numpy as jnp
    >>> from jvpipe.trace.graph import build_graph
    >>> from jvpipe.trace.loss import trace_loss
    >>> def loss_fn(params, x, rng):
    ...     return jnp.sum(jnp.tanh(x @ params[0]) @ params[1])
    >>> w = jnp.ones((2, 2))
    >>> traced = build_graph(trace_loss(loss_fn, [w, w], w, None), cuts=[])
    >>> halves = split_layers(traced, {0: split_points(traced, 0, lambda eqns, outputs: [1.0] * len(eqns))[0]})
    >>> [[eqn.primitive.name for eqn in body.eqns] for body in halves.bodies]
    [['dot_general', 'tanh'], ['dot_general', 'reduce_sum']]
    """
    sorted_eqns, body = Sorted.of(traced.loss), traced.bodies[layer]
    start, end = _bounds(traced, sorted_eqns)[layer]
    parameters = [v for v, ref in traced.loss.inputs.items() if ref.kind == ValueKind.PARAMETER]
    run, behind = sorted_eqns.main[start:end], parameters_behind(sorted_eqns.floating, parameters)
    products = [p for p, eqn in enumerate(run) if flops(eqn)]
    eqns_s = list(seconds(body.eqns, body.outputs))
    total_s, points = sum(eqns_s), []
    for p in products[1:]:
        before_end = len(run) - p
        first, second = _reads(run[:p]), _reads(run[p:])
        if not _behind(first, behind).isdisjoint(_behind(second, behind)):
            continue
        # The layer's floating equations come before its run, so they count in the first half.
        later_s = sum(eqns_s[len(eqns_s) - before_end :])
        slower = max(later_s, total_s - later_s) / total_s if total_s else 1.0
        sent = {v for eqn in run[:p] for v in eqn.outvars} & second
        points.append((round(slower / _EVEN), sum(map(_bytes, sent)), before_end))
    return [before_end for *_, before_end in sorted(points)]


def split_layers(traced: Traced, where: dict[int, int]) -> Traced:
    """Returns the same model with some layers cut in two.

    Args:
        traced: the model.
        where: by layer, how many equations before its end.
    """
    bounds = _bounds(traced, Sorted.of(traced.loss))
    further = [bounds[layer][1] - before_end for layer, before_end in where.items()]
    return build_graph(traced.loss, traced.cuts, sorted([*traced.splits, *further]))


def split_as_planned(traced: Traced, splits: Sequence[int]) -> Traced:
    """Returns a model with layers cut in two as a plan says.

    Args:
        traced: the model, whose layers are whole.
        splits: the places, among its main equations.

    Raises:
        ValueError: there is no such place inside a layer.
    """
    if not splits:
        return traced
    end = len(Sorted.of(traced.loss).main)
    wrong = [p for p in splits if not 0 < p < end or p in traced.cuts or splits.count(p) > 1]
    if wrong:
        raise ValueError(
            f"the plan splits layers before equations {wrong}, where this model has no inside of a layer (it has "
            f"{end} equations): the plan was made for another model. Let the planner make one, by stages=N"
        )
    return build_graph(traced.loss, traced.cuts, splits)


def _bounds(traced: Traced, sorted_eqns: Sorted) -> list[tuple[int, int]]:
    return list(pairwise([0, *sorted([*traced.cuts, *traced.splits]), len(sorted_eqns.main)]))


def _behind(values: Collection[Var], behind: dict[Var, frozenset[Var]]) -> set[Var]:
    return set().union(*(behind.get(v, ()) for v in values))


def _reads(eqns: Sequence[JaxprEqn]) -> set[Var]:
    return set(jaxprs.free_variables(eqns))


def _bytes(var: Var) -> int:
    aval = _jax.aval(var)
    return aval.size * aval.dtype.itemsize
