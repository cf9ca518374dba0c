"""Every optimizer that has a name goes downhill, under the rate of its recipe."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.models.recipe import OPTIMIZERS, Recipe
from jvpipe.models.workload import load
from tests.grid import grid

RATES = {"sgd": 0.3, "momentum": 0.05}


@pytest.mark.parametrize("local", grid([False, True], False))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_goes_downhill(name: str, local: bool) -> None:
    recipe = Recipe(RATES.get(name, 0.1), optimizer_name=name, warmup_steps=2)
    optimizer = recipe.optimizer(40, local=local)
    params: Any = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(40):
        params, state = step(params, state)
    assert all(np.abs(leaf).max() < 0.5 for leaf in jax.tree.leaves(params)), params


def test_only_matrices_decay_although_vectors_are_stacked() -> None:
    workload = load("llama", "tiny")
    params = workload.init(jax.random.key(0))
    params = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    optimizer = Recipe(1.0, weight_decay=0.5, warmup_steps=0).optimizer(10)
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert bool(jnp.any(update != 0)) == (not name.endswith("scale")), name


def test_a_warm_up_may_be_as_long_as_the_run_or_none() -> None:
    assert Recipe(1.0, warmup_steps=9).learning_rates(4).tolist() == [0.25, 0.5, 0.75, 1.0]
    assert Recipe(1.0, warmup_steps=0).learning_rates(4)[0] == 1.0
