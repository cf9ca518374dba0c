"""What an optimizer freezes, read off its trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe._jax import jaxpr_as_fun
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.programs.stacked_trace import trace_stacked

SHAPES = {
    "base": jax.ShapeDtypeStruct((3, 2), np.float32),
    "head": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
}
BASE, HEAD = 0, 1
MASK = {"base": True, "head": False}


def traced(
    optimizer: Any, params: Any = SHAPES, grad_norm: bool = False, **options: Any
) -> TracedOptimizer:
    readers = [1] * len(jax.tree.leaves(params))
    return trace_stacked(optimizer, params, readers, 2, grad_norm=grad_norm, stacks=None, **options)


def by_label(trained: Any) -> optax.GradientTransformation:
    rules: dict[Any, Any] = {True: optax.set_to_zero(), False: trained}
    return optax.multi_transform(rules, MASK)


def zeroed() -> optax.GradientTransformation:
    return optax.masked(optax.set_to_zero(), MASK)


@pytest.mark.parametrize(
    "optimizer",
    [
        by_label(optax.adamw(0.1)),
        by_label(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
        optax.chain(optax.adamw(0.1), zeroed()),
        optax.chain(zeroed(), optax.scale(-0.1)),
        optax.chain(optax.trace(0.9), zeroed()),
        optax.inject_hyperparams(lambda rate: by_label(optax.adam(rate)))(rate=0.1),
        optax.chain(optax.sgd(0.1), zeroed(), optax.keep_params_nonnegative(), zeroed()),
    ],
    ids=["label", "norm of the rest", "at the end", "scaled", "momentum", "injected", "last word"],
)
def test_frozen_is_what_comes_back_as_it_was(optimizer: Any) -> None:
    found = traced(optimizer)
    assert found.frozen == {BASE}
    inputs, results = found.update.jaxpr.invars, found.update.jaxpr.outvars
    assert results[BASE] is inputs[2 + BASE]  # after two gradients
    read = {v for eqn in found.update.jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    assert inputs[BASE] not in read
    assert inputs[1 + BASE] in read or inputs[HEAD] in read
    assert BASE not in found.parameter_of


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(zeroed(), optax.adamw(0.1)),
        optax.chain(optax.clip_by_global_norm(1.0), by_label(optax.sgd(0.1))),
        optax.apply_if_finite(by_label(optax.sgd(0.1)), 3),
        optax.chain(zeroed(), optax.sgd(optax.linear_schedule(0.1, 0.0, 10))),
        optax.masked(optax.sgd(0.1), {"base": False, "head": True}),
    ],
    ids=[
        "decay",
        "norm of all",
        "finite",
        "a rate that may be infinite",
        "gradients added as they are",
    ],
)
def test_what_changes_or_whose_gradient_is_read_is_not(optimizer: Any) -> None:
    assert traced(optimizer).frozen == frozenset()


def test_a_norm_that_is_reported_reads_all_gradients() -> None:
    assert traced(by_label(optax.sgd(0.1)), grad_norm=True).frozen == frozenset()
    named = traced(optax.sgd(0.1), grad_norm=True, frozen=[BASE])
    assert named.frozen == {BASE}
    ones = [np.ones(x.shape, x.dtype) for x in jax.tree.leaves(SHAPES)]
    *_, norm = jaxpr_as_fun(named.update)(*ones, *ones)
    np.testing.assert_allclose(norm, np.sqrt(2 * 0.5**2), rtol=1e-6)  # of two halves


def test_what_is_narrower_than_its_sum_comes_back_too() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, np.float32), updates)
        return zeros | {"base": updates["base"]}, state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    assert traced(optimizer).frozen == {HEAD}  # bfloat16, added to zeros in float32 and cast back


def test_a_cast_that_loses_digits_changes_a_parameter() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        narrow = params["base"].astype(jnp.bfloat16).astype(np.float32)
        return updates | {"base": narrow - params["base"]}, state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    assert traced(optimizer).frozen == frozenset()


def test_state_of_the_gradient_alone_is_gone_and_all_else_as_it_was() -> None:
    found = traced(optax.chain(optax.adam(0.1), zeroed()))
    assert [leaf.name for leaf in found.state] == ["0/0/count", "0/0/mu/head", "0/0/nu/head"]
    state = jax.tree.unflatten(found.state_tree, found.state)
    assert state[0][0].mu["base"] == optax.MaskedNode()
    whole = optax.adam(0.1).init({"head": jnp.ones(2, jnp.bfloat16)})
    params = [np.ones(x.shape, x.dtype) for x in jax.tree.leaves(SHAPES)]
    begun = jaxpr_as_fun(found.init)(*params)
    jax.tree.map(np.testing.assert_array_equal, begun, jax.tree.leaves(whole))


def test_state_that_others_read_keeps_a_gradient() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        mean = jax.tree.map(lambda a, b: a + b, state, updates)
        scaled = updates["head"] * jnp.sum(state["base"]).astype(jnp.bfloat16)
        return {"base": jnp.zeros_like(updates["base"]), "head": scaled}, mean

    optimizer = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    assert traced(optimizer).frozen == frozenset()


def test_an_optimizer_finds_nothing_in_the_place_of_what_is_named() -> None:
    shapes = SHAPES | {"base": jax.ShapeDtypeStruct((3, 2), jnp.int4)}
    seen: list[Any] = []

    def init(params: Any) -> Any:
        seen.append(params)
        return optax.adam(0.1).init(params)

    found = traced(
        optax.GradientTransformation(init, optax.adam(0.1).update), shapes, frozen=[BASE]
    )
    assert found.frozen == {BASE}
    assert all(params["base"] == optax.MaskedNode() for params in seen)
    assert [leaf.name for leaf in found.state] == ["0/count", "0/mu/head", "0/nu/head"]
    assert found.parameter_of == (None, HEAD, HEAD)
    assert str(found.update.out_avals[BASE].dtype) == "int4"
