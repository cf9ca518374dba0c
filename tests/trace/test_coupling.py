"""Why the loss of a batch is not the mean of those of its micro-batches; nothing is said of a
mean.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.weighted import Weighted
from jvpipe.trace.coupling import why_splitting_matters
from jvpipe.trace.graph import build_graph
from jvpipe.trace.loss import trace_loss

PARAMS = {"v": np.ones((4, 8), np.float32), "w": np.ones((8, 8), np.float32)}


def place(loss_fn: Callable[..., Any], examples: int = 6, **options: Any) -> str | None:
    """Where examples meet in a loss of (params, x [examples, 4], rng)."""
    batch = np.ones((examples, 4), np.float32)
    return why_splitting_matters(build_graph(trace_loss(loss_fn, PARAMS, batch, None, **options)))


def hidden(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["v"])


def squared(params: Any, x: jax.Array, rng: Any = None) -> jax.Array:
    return jnp.mean((hidden(params, x) @ params["w"]) ** 2)


def summed(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    return jnp.sum(hidden(params, x) ** 2) + 0.1 * jnp.sum(params["w"] ** 2)


def weighted(params: Any, x: jax.Array, rng: Any) -> Weighted:
    total = jnp.sum(jnp.where(x > 0, x, 0.0) @ params["v"])
    return Weighted(total, jnp.sum(x > 0.0, dtype=jnp.float32))


def contrastive(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    """Each example is told from the others of its batch."""
    one = hidden(params, x)
    with jax.named_scope("in_batch"):
        logits = one @ (one @ params["w"]).T
    labels = jnp.arange(logits.shape[0])
    return -jnp.mean(jax.nn.log_softmax(logits)[labels, labels])


def normed(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    """Batch norm by the statistics of its batch."""
    h = hidden(params, x)
    mean, variance = (f(h, 0, keepdims=True) for f in (jnp.mean, jnp.var))
    h = (h - mean) * jax.lax.rsqrt(variance + 1e-5)
    return jnp.mean((h @ params["w"]) ** 2)


def remembered(params: Any, state: Any, x: jax.Array, rng: Any) -> tuple[jax.Array, Any]:
    """The same, whose mean the model state keeps."""
    return normed(params, x, rng), 0.9 * state + 0.1 * jnp.mean(hidden(params, x), 0)


def over_items(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    return jnp.sum(hidden(params, x)) / jnp.sum(x > 0, dtype=jnp.float32)


@pytest.mark.parametrize("loss_fn", [squared, weighted])
@pytest.mark.parametrize("examples", [1, 2, 5])
def test_splitting_does_not_matter_to_a_mean_nor_to_a_weighted_of_sums(
    loss_fn: Callable[..., Any], examples: int
) -> None:
    assert place(loss_fn, examples) is None


@pytest.mark.parametrize("examples", [1, 6])
def test_a_sum_is_no_mean_of_the_sums_of_its_parts(examples: int) -> None:
    found = place(summed, examples)
    assert found is not None
    assert found.endswith("the loss is a sum over its examples")


@pytest.mark.parametrize("examples", [1, 2, 6])
def test_examples_meet_in_the_logits_of_an_in_batch_softmax(examples: int) -> None:
    found = place(contrastive, examples)
    assert found is not None
    assert "'dot_general' in in_batch makes" in found
    if examples == 6:
        assert "makes [6, 6] of 6 examples and [12, 12] of 12" in found
        assert found.startswith("layer ")


def test_they_meet_in_a_batch_norm() -> None:
    found = place(normed)
    assert found is not None
    assert "'sub'" in found
    assert "gives single examples a value that was made from several examples" in found


def test_a_batch_norm_that_the_model_state_remembers_is_no_exception() -> None:
    batch, state = np.ones((6, 4), np.float32), np.zeros(8, np.float32)
    traced = build_graph(trace_loss(remembered, PARAMS, batch, None, state, has_state=True))
    found = why_splitting_matters(traced)
    assert found is not None
    assert "gives single examples" in found


def test_a_mean_over_a_varying_number_of_items_is_neither_a_mean_nor_a_sum() -> None:
    found = place(over_items)
    assert found is not None
    assert "the loss is neither a mean nor a sum over its examples" in found


def test_metrics_may_look_at_all_examples() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> tuple[jax.Array, jax.Array]:
        return squared(params, x), jnp.max(x @ x.T)

    assert place(loss_fn, has_aux=True) is None


def test_nothing_is_said_of_a_loss_that_takes_one_number_of_examples() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        return squared(params, x.reshape(6, 4)) + jnp.sum(x @ x.T)

    assert place(loss_fn) is None


def test_a_sum_over_a_weight_that_is_none_is_no_mean() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> Weighted:
        return Weighted(jnp.sum(hidden(params, x) ** 2), jnp.float32(100.0))

    assert "the loss is a sum over its examples" in (place(loss_fn) or "")
