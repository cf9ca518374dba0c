"""Seconds and bytes of programs whose kernels can be counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe._jax import ClosedJaxpr
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.roofline import seconds
from jvpipe.trace.flatten import flatten

N = 64
ARRAY = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def device(**kwargs: float) -> Accelerator:
    """A device that is infinitely fast but for what is said."""
    rates = {
        "memory_bytes_per_s": 1e300,
        "elementwise_per_s": 1e300,
        "launch_s": 0.0,
        "products": 1e300,
    }
    rates |= kwargs
    return Accelerator(
        "d",
        10**9,
        rates["memory_bytes_per_s"],
        {"float32": rates["products"]},
        rates["launch_s"],
        rates["elementwise_per_s"],
    )


def program(fn: Callable[..., Any], arrays: int = 1) -> ClosedJaxpr:
    return flatten(fn, *[ARRAY] * arrays)


def kernels(closed: ClosedJaxpr) -> float:
    return seconds(closed, device(launch_s=1.0))


def moved(closed: ClosedJaxpr) -> float:
    """Bytes read and written, in arrays."""
    return seconds(closed, device(memory_bytes_per_s=1.0)) / BYTES


def test_a_product_is_its_operations_or_its_bytes() -> None:
    product = program(lambda x, y: x @ y, 2)
    assert seconds(product, device(products=1.0)) == 2 * N**3
    assert moved(product) == 3
    assert seconds(product, device(products=N / 2, memory_bytes_per_s=1.0)) == 3 * BYTES
    assert kernels(product) == 1


def test_elementwise_operations_are_one_kernel_that_reads_once() -> None:
    chain = program(lambda x: jnp.tanh(x + 1.0) * 2.0 + x)
    assert kernels(chain) == 1
    assert moved(chain) == 2
    assert seconds(chain, device(elementwise_per_s=1.0)) == (1 + 8 + 1 + 1) * N * N


def test_a_product_reads_what_is_made_for_it() -> None:
    both = program(lambda x, y: jnp.tanh(x) @ y, 2)
    assert kernels(both) == 2
    assert moved(both) == 2 + 3


def test_other_names_of_a_value_cost_nothing() -> None:
    renamed = program(
        lambda x, y: jax.lax.optimization_barrier(x.reshape(-1)).reshape(N, N).T @ y, 2
    )
    assert kernels(renamed) == 1


def test_a_reduction_is_written_and_what_follows_reads_it() -> None:
    norm = program(lambda x: x - jnp.sum(x, 0, keepdims=True))
    assert kernels(norm) == 2
    assert moved(norm) == pytest.approx(1 + 1 + 1 + 2 / N)


def test_a_part_of_an_array_is_all_that_is_read_of_it() -> None:
    lookup = program(lambda x: x[jnp.array([3, 5])] * 1.0)
    assert moved(lookup) < 9 / N


def test_an_update_of_a_part_writes_this_part() -> None:
    half = program(lambda x, y: jax.lax.dynamic_update_slice(x, y[: N // 2], (3, 0)), 2)
    assert moved(half) == 1.5 + 0.5  # read and written


def test_a_scan_takes_its_body_as_often_as_it_runs() -> None:
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=37)[0]

    assert seconds(program(loop, 2), device(products=1.0)) == 37 * 2 * N**3


def test_of_branches_the_longest_counts() -> None:
    branch = program(
        lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    )
    assert seconds(branch, device(products=1.0)) == 2 * 2 * N**3


def test_random_bits_are_dear() -> None:
    mask = flatten(lambda key: jax.random.bernoulli(key, 0.1, (N, N)), jax.random.key(0))
    assert seconds(mask, device(elementwise_per_s=1.0)) > 50 * N * N
