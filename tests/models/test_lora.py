"""Adapters change nothing at first, are all that is trained, and can be added to what they
adapt.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe import models
from jvpipe.models import gpt2, llama, lora
from tests.grid import grid

KEY = jax.random.key(0)


def shaken(params: Any) -> Any:
    """Parameters whose adapters are not zero."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(KEY, len(leaves))
    drawn = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


@pytest.mark.thorough
@pytest.mark.parametrize("module", grid([llama, gpt2], gpt2))
def test_a_plain_model_with_merged_kernels_computes_the_same(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    plain, adapted = models.load(name, "tiny"), models.load(name, "tiny", lora=2, lora_on="*")
    first, fresh = plain.init(KEY), adapted.init(KEY)
    batch = {"tokens": jnp.arange(16).reshape(2, 8) % 300}
    of_plain, of_adapted = map(module.logits_function, (plain.config, adapted.config))
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(fresh), first)
    np.testing.assert_array_equal(of_adapted(fresh, batch, None), of_plain(first, batch, None))
    params = shaken(fresh)
    wanted, found = (
        of_adapted(params, batch, None),
        of_plain(lora.merged_params(params), batch, None),
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    base = of_plain(lora.without_adapters(params), batch, None)
    assert np.abs(wanted - base).max() > 1e-3
    both = lora.joined_params(lora.without_adapters(params), lora.adapters_alone(params))
    jax.tree.map(np.testing.assert_array_equal, both, params)


def test_adapters_alone_are_trained_and_the_rest_has_no_state() -> None:
    workload = models.load("llama", "tiny", lora=2)
    shapes = workload.abstract_batch(4)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    pipe = jvpipe.Pipeline(workload.loss_fn, workload.optimizer(10), stages=2, microbatches=2)
    before = workload.init(KEY)
    state = pipe.init(before, batch, KEY)
    for _ in range(2):
        state, _ = pipe.step(state, batch)
    after = pipe.params(state)
    same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), before, after)
    assert all(jax.tree.leaves(lora.without_adapters(same)))
    assert not any(jax.tree.leaves(lora.adapters_alone(same)))
    kept = sum(x.size for x in jax.tree.leaves(pipe.optimizer_state(state)) if x.ndim)
    assert kept == 2 * sum(x.size for x in jax.tree.leaves(lora.adapters_alone(before)))


def test_linear_maps_that_no_pattern_matches_are_named() -> None:
    with pytest.raises(ValueError, match=r"'quer\*' matches no linear map: there are blocks/att"):
        models.load("llama", "tiny", lora=2, lora_on="quer*")
    with pytest.raises(ValueError, match="lora=-1 must be a rank"):
        models.load("llama", "tiny", lora=-1)
    adapted = models.load("llama", "tiny", lora=2, lora_on="*queries, *gate").init(KEY)
    assert list(lora.adapters_alone(adapted)["blocks"]) == ["attention", "gate"]


def test_a_recipe_trains_what_it_names() -> None:
    recipe = models.load("gpt2", "tiny", lora=1).recipe
    assert recipe is not None
    params: Any = {"a": {"lora": {"x": jnp.ones(2)}, "kernel": jnp.ones(2)}}
    update, _ = recipe.optimizer(5).update(params, recipe.optimizer(5).init(params), params)
    moved: Any = optax.apply_updates(params, update)
    assert bool((moved["a"]["kernel"] == 1).all())
    assert bool((moved["a"]["lora"]["x"] != 1).all())
