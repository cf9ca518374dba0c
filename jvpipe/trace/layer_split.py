"""Cuts a layer in two if the layer is too large a part of a stage.

The two halves must give results that are bitwise identical to those of the whole layer. So a
layer may be cut only at some places:

- The place must be right before a product, but not before the layer's first product. XLA writes the
  values that cross such a cut to memory in any case: in the forward they are operands of a product,
  and in the backward their cotangents are results of products. So the cut need not change what XLA
  computes, and two programs can give the same results as one. `jvpipe.programs.bit_equality` tests
  whether they do.
- The place must not be between two readers of a parameter. Each half would make a gradient of the
  parameter, and adding the two gradients could round differently from the whole layer.

The choice depends only on the layer itself. So layers that are alike are cut alike, and no other
layer changes.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.cuts import LAYERS
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.primitives import flops
from jvpipe.trace.sorted_equations import Sorted
from jvpipe.trace.sums import parameters_behind

Seconds = Callable[[Sequence[JaxprEqn], Sequence[Atom]], Sequence[float]]
"""A function from equations and the outputs that they must make to the seconds of each equation."""


def layer_signature(body: Body) -> Hashable:
    """Returns a value that is equal for layers that compute the same function and gradients."""
    return body.structure, body.differentiable, body.active, body.returned, body.received


def split_points(
    traced: Traced,
    layer: int,
    seconds: Seconds,
) -> list[int]:
    """Returns the places at which a layer can be cut in two, the most even halves first.

    Each place is given as the number of equations between it and the layer's end.

    Args:
        traced: the model.
        layer: the number of the layer.
        seconds: returns how long each equation of the layer takes.

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
    (places,) = places_inside(traced, [layer], seconds).values()

    def evenness(place: CutPlace) -> tuple[int, int, int]:
        slower = max(place.share, 1 - place.share)
        return round(slower / LAYERS.even), place.sent_bytes, place.before_end

    return [place.before_end for place in sorted(places, key=evenness)]


@dataclass(frozen=True)
class CutPlace:
    """A place inside a layer at which it may be cut.

    Attributes:
        before_end: how many equations lie between the place and the layer's end.
        share: the fraction of the layer's seconds that the equations before the place take.
        sent_bytes: the bytes that the first half makes and the second half reads.
    """

    before_end: int
    share: float
    sent_bytes: int


def places_inside(
    traced: Traced,
    layers: Iterable[int],
    seconds: Seconds,
) -> dict[int, list[CutPlace]]:
    """Returns the places at which layers can be cut, in order, by the layers' numbers.

    Args:
        traced: the model.
        layers: the numbers of the layers.
        seconds: returns how long each equation of a layer takes. It is called once for all layers
            with the same `layer_signature`.
    """
    sorted_eqns = Sorted.of(traced.loss)
    bounds = _bounds(traced, sorted_eqns)
    parameters = traced.loss.inputs_of(ValueKind.PARAMETER)
    behind = parameters_behind(sorted_eqns.floating, parameters)
    by_kind: dict[Hashable, list[CutPlace]] = {}
    found = {}
    for layer in layers:
        body = traced.bodies[layer]
        kind = layer_signature(body)
        if kind not in by_kind:
            run = sorted_eqns.main[slice(*bounds[layer])]
            run_s = seconds(body.eqns, body.outputs)
            by_kind[kind] = _places(run, behind, run_s)
        found[layer] = by_kind[kind]
    return found


def _places(
    run: Sequence[JaxprEqn],
    behind: dict[Var, frozenset[Var]],
    eqns_s: Sequence[float],
) -> list[CutPlace]:
    """Returns the places at which a layer can be cut.

    Args:
        run: the main equations of the layer.
        behind: for each result of a floating equation, the parameters that it is made of.
        eqns_s: the seconds of all equations of the layer; the main equations come last.
    """
    total_s = sum(eqns_s)
    places = []
    products = [p for p, eqn in enumerate(run) if flops(eqn)]
    for p in products[1:]:
        before_end = len(run) - p
        first = set(jaxprs.free_variables(run[:p]))
        second = set(jaxprs.free_variables(run[p:]))
        shared = _behind(first, behind) & _behind(second, behind)
        if shared:
            continue
        # The layer's floating equations come before its run, so they count in the first half.
        later_s = sum(eqns_s[len(eqns_s) - before_end :])
        share = (total_s - later_s) / total_s if total_s else 0.0
        sent = jaxprs.defined(run[:p]) & second
        places.append(
            CutPlace(
                before_end,
                share,
                sum(map(jaxprs.bytes_of, sent)),
            )
        )
    return places


def split_layers(traced: Traced, where: dict[int, int]) -> Traced:
    """Returns the same model with some layers cut in two.

    Args:
        traced: the model.
        where: for each layer to cut, how many equations lie between the cut and the layer's end.
    """
    return split_at(traced, where.items())


def split_at(traced: Traced, where: Iterable[tuple[int, int]]) -> Traced:
    """Returns the same model with some layers cut, each at one or several places.

    Args:
        traced: the model.
        where: pairs of a layer and the number of equations between the cut and the layer's end.
    """
    bounds = _bounds(traced, Sorted.of(traced.loss))
    further = [bounds[layer][1] - before_end for layer, before_end in where]
    splits = sorted([*traced.splits, *further])
    return build_graph(traced.loss, traced.cuts, splits)


def split_as_planned(traced: Traced, splits: Sequence[int]) -> Traced:
    """Returns a model with layers cut where a plan says.

    Args:
        traced: the model, whose layers are not split yet.
        splits: the places to cut, as positions among the model's main equations.

    Raises:
        ValueError: a place is not inside a layer, or is given twice.
    """
    if not splits:
        return traced
    end = len(Sorted.of(traced.loss).main)
    inside = range(1, end)
    # A place that is given twice would make a layer without equations.
    twice = [p for p in splits if splits.count(p) > 1]
    wrong = [p for p in splits if p not in inside or p in traced.cuts or p in twice]
    if wrong:
        raise ValueError(
            f"the plan splits layers before equations {wrong}, which are not inside layers of "
            f"this model (it has {end} equations): the plan was made for another model. Let the "
            "planner make a new plan, with stages=N"
        )
    return build_graph(traced.loss, traced.cuts, splits)


def _bounds(traced: Traced, sorted_eqns: Sorted) -> list[tuple[int, int]]:
    inner = sorted([*traced.cuts, *traced.splits])
    return list(pairwise([0, *inner, len(sorted_eqns.main)]))


def _behind(values: Collection[Var], behind: dict[Var, frozenset[Var]]) -> set[Var]:
    return set().union(*(behind.get(v, ()) for v in values))
