"""What cannot be cut says so, and what nothing should train is warned of."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe.planners.loop_reasons import loop_reasons
from jvpipe.trace.model import trace_model
from jvpipe.trace.modules import warn_of_statistics


def test_a_layer_that_is_a_loop_over_time_says_so() -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x = jnp.tanh(batch @ params["in"])

        def step(carry: Any, now: Any) -> Any:
            carry = jnp.tanh(carry @ params["time"] + now)
            return carry, carry

        _, x = jax.lax.scan(step, jnp.zeros((4, 8)), x)
        return jnp.mean((x @ params["out"]) ** 2)

    weights = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in ("in", "time", "out")}
    batch = jax.ShapeDtypeStruct((10, 4, 8), jnp.float32)
    traced = trace_model(loss_fn, weights, batch, None).traced
    (reason,) = loop_reasons(traced)
    assert "has a loop of 10 iterations, which share their parameters" in reason
    assert "unroll=True" in reason


def test_a_loop_without_a_known_end_says_so_beside_one_that_runs_once() -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        still = jax.lax.stop_gradient(params["in"])
        grown = jax.lax.while_loop(lambda x: x[0, 0] < 2, lambda x: x + 1, still)
        step = lambda carry, now: (jnp.tanh(carry + now), None)  # noqa: E731
        x, _ = jax.lax.scan(step, jnp.zeros((4, 8)), (batch @ grown)[None])
        return jnp.mean((x @ params["out"]) ** 2)

    weights = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in ("in", "out")}
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    (reason,) = loop_reasons(trace_model(loss_fn, weights, batch, None).traced)
    assert "has a loop of an unknown number of iterations" in reason


def test_running_statistics_that_are_trained_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "jvpipe"):
        warn_of_statistics(["params/Dense_0/kernel"])
        assert not caplog.messages
        warn_of_statistics(["batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var", "w"])
    (told,) = caplog.messages
    assert "'batch_stats/BatchNorm_0/mean' and 1 others are running statistics" in told
    assert "has_state=True" in told
