"""Model flops of models whose products can be counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe.cost.utilization import ideal_s, product_flops
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.primitives import flops

N, BLOCKS, MICRO = 64, 3, 4
FORWARD = 2 * N**3 * BLOCKS
H100, CPU = "NVIDIA H100 80GB HBM3", "cpu"
F32, BF16 = 495e12, 989e12


def traced(loss_fn: Any, dtype: Any = jnp.float32) -> Traced:
    weights, x = jax.ShapeDtypeStruct((BLOCKS, N, N), dtype), jax.ShapeDtypeStruct((N, N), dtype)
    return build_graph(trace_loss(loss_fn, weights, x, None))


def unrolled(weights: Any, x: Any, rng: Any) -> Any:
    for i in range(BLOCKS):
        x = jnp.tanh(x @ weights[i])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def scanned(weights: Any, x: Any, rng: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)


def inside_a_loop(weights: Any, x: Any, rng: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        return jnp.tanh(x @ weights[0]), None

    return jnp.mean(jax.lax.scan(body, x, None, length=BLOCKS)[0] ** 2)


@pytest.mark.parametrize("loss_fn", [unrolled, scanned, inside_a_loop])
def test_a_product_counts_three_times_for_each_micro_batch(loss_fn: Any) -> None:
    assert ideal_s(traced(loss_fn), MICRO, [H100]) == pytest.approx(3 * MICRO * FORWARD / F32)


def test_one_branch_counts_and_one_round_of_a_while_loop() -> None:
    def branch(x: jax.Array) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    def loop(x: jax.Array) -> Any:
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((N, N), jnp.float32)
    for function, products in ((branch, 2), (loop, 1)):
        (*_, eqn) = jax.make_jaxpr(function)(x).eqns
        assert product_flops([eqn]) == {"float32": products * 2 * N**3}
        assert flops(eqn) == products * 2 * N**3


def test_devices_share_the_work_at_the_peak_of_its_type() -> None:
    found = ideal_s(traced(unrolled, jnp.bfloat16), 1, [H100, H100])
    assert found == pytest.approx(3 * FORWARD / (2 * BF16))


@pytest.mark.parametrize("kinds", [(CPU,), (H100, CPU), ("a card of tomorrow",)])
def test_where_a_peak_is_not_known_nothing_is_told(kinds: tuple[str, ...]) -> None:
    assert ideal_s(traced(unrolled), 1, kinds) is None
