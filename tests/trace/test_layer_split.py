"""Layers cut in two: where they may be, where it is most even, and that nothing else changes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe._jax import Atom, JaxprEqn
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.layer_split import layer_signature, split_as_planned, split_layers, split_points
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.primitives import flops
from tests.zoo import transformer


def by_flops(eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> list[float]:
    return [float(flops(eqn)) for eqn in eqns]


def blocks() -> Traced:
    case = transformer(4)
    return build_graph(trace_loss(case.loss_fn, case.params, case.batch, case.rng))


def chain(*widths: int, tied: bool = False) -> Traced:
    """One layer: a product of each width after another; tied, the last one reads the first one's
    weights.
    """
    shapes = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise(widths)]

    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        for w in [*params, params[0]] if tied else params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return build_graph(
        trace_loss(loss_fn, shapes, jax.ShapeDtypeStruct((2, widths[0]), jnp.float32), None),
        cuts=[],
    )


def products(traced: Traced) -> list[int]:
    return [sum(flops(eqn) > 0 for eqn in body.eqns) for body in traced.bodies]


def test_the_most_even_place_comes_first() -> None:
    whole = chain(4, 4, 4, 8, 1)  # 16, 16, 32, 8 products a row
    found = [
        products(split_layers(whole, {0: place})) for place in split_points(whole, 0, by_flops)
    ]
    assert found == [[2, 2], [1, 3], [3, 1]]


def test_of_places_alike_the_one_that_sends_less_comes_first() -> None:
    whole = chain(8, 4, 16, 2, 16)
    first = split_layers(whole, {0: split_points(whole, 0, lambda eqns, _: [0.0] * len(eqns))[0]})
    assert [t.array.shape for t in first.graph.tensors] == [(2, 2)]


def test_halves_read_no_parameter_both() -> None:
    assert split_points(chain(4, 4, tied=True), 0, by_flops) == []
    assert len(split_points(chain(4, 4, 4), 0, by_flops)) == 1


def test_one_product_is_no_two_halves() -> None:
    assert split_points(chain(4, 4), 0, by_flops) == []


def test_other_layers_stay_as_they_are_and_layers_alike_are_cut_alike() -> None:
    whole = blocks()
    kinds = [layer_signature(body) for body in whole.bodies]
    alike = [i for i, k in enumerate(kinds) if k == kinds[2]]
    assert alike == [2, 4, 6]
    place = split_points(whole, 2, by_flops)[0]
    assert [split_points(whole, i, by_flops)[0] for i in alike] == [place] * 3
    halves = split_layers(whole, dict.fromkeys(alike, place))
    finer = [layer_signature(body) for body in halves.bodies]
    assert finer[2:10:3] == [finer[2]] * 3
    assert finer[3:11:3] == [finer[3]] * 3
    assert [k for k in finer if k not in (finer[2], finer[3])] == [
        k for k in kinds if k != kinds[2]
    ]
    assert [len(p.readers) for p in halves.graph.parameters] == [
        len(p.readers) for p in whole.graph.parameters
    ]


def test_a_split_is_found_again_by_its_place() -> None:
    whole = blocks()
    halves = split_layers(whole, {2: split_points(whole, 2, by_flops)[0]})
    again = split_as_planned(whole, halves.splits)
    assert again.graph == halves.graph
    assert (again.cuts, again.splits) == (whole.cuts, halves.splits)
    assert split_as_planned(whole, ()) is whole
    deeper = split_layers(halves, {1: split_points(halves, 1, by_flops)[0]})
    assert set(halves.splits) < set(deeper.splits)


def test_places_that_are_in_no_layer_are_refused() -> None:
    whole = blocks()
    for wrong in ([0], [10**6], [whole.cuts[0]], [whole.cuts[0] + 1] * 2):
        with pytest.raises(ValueError, match="not inside layers"):
            split_as_planned(whole, wrong)
