"""Weight decay in the loss ties no parameter to the layer of the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from tests.sequential import Sequential
from tests.zoo import Case, draws, mean_square, mlp, regression_batch


def decayed(case: Case, *, first: bool = False) -> Case:
    """The case with the squares of its parameters added, made before the model runs or after."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        squares = [1e-2 * jnp.sum(p**2) for p in jax.tree.leaves(params)] if first else []
        loss = case.loss_fn(params, batch, rng)
        return sum(squares or [1e-2 * jnp.sum(p**2) for p in jax.tree.leaves(params)], start=loss)

    return Case(loss_fn, case.params, case.batch)


def scaled_by_norms(depth: int = 7) -> Case:
    """Each product is divided by the norm of its matrix; the first norm is read again at the
    end.
    """
    draw = draws(0)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x, norms = batch["x"], []
        for w in params:
            norms.append(jnp.sqrt(jnp.sum(w**2)))
            x = jnp.tanh(x @ (w / norms[-1]))
        return mean_square(x, batch["y"]) + 0.1 * norms[0]

    return Case(loss_fn, [draw(8, 8) for _ in range(depth)], regression_batch(4, 8))


def traced(case: Case) -> Traced:
    return build_graph(trace_loss(case.loss_fn, case.params, case.batch, None))


def assert_equals_plain_jax(case: Case) -> None:
    found = Sequential(traced(case), optimize=False).run(case.params, case.batch, None)
    loss, gradients = jax.jit(jax.value_and_grad(case.loss_fn))(case.params, case.batch, None)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    for ours, theirs in zip(found.gradients, jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_layer_sums_its_own_parameters() -> None:
    for first in (False, True):
        graph = traced(decayed(mlp(7), first=first)).graph
        assert list(graph.tied()) == []
        sums = [t for t in graph.tensors if t.array.shape == ()]
        assert [(t.producer, t.readers) for t in sums] == [
            (layer, (6,)) for layer in range(6) for _ in "wb"
        ]
        assert all(t.differentiable for t in sums)


def test_sums_are_differentiated_where_they_are_made() -> None:
    assert_equals_plain_jax(decayed(mlp(7)))


def test_a_norm_that_its_own_layer_needs_stays_there() -> None:
    graph = traced(scaled_by_norms()).graph
    assert [p.readers for p in graph.parameters] == [(0, 6)] + [(layer,) for layer in range(1, 7)]
    assert_equals_plain_jax(scaled_by_norms())
