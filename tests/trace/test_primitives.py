"""What costs little, what is work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import JaxprEqn
from jvpipe.trace.flatten import flatten
from jvpipe.trace.primitives import flops, is_cheap, is_heavy, is_random
from tests.zoo import convolution

X = np.ones((4, 8), np.float32)


def last(fn: Callable, *args: Any) -> JaxprEqn:
    return flatten(fn, *args, keep_rules=True).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    "fn",
    [
        jnp.sin,
        lambda x: x + 1,
        lambda x: jnp.sum(x, 0),
        lambda x: x.T,
        lambda x: x[1:3],
        lambda x: jnp.stack([x, x]),
        lambda x: jnp.tile(x, (2, 2)),
        lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0)),
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jnp.where(x > 0, x, 0),
        jax.nn.relu,
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    ],
)
def test_work_on_one_element_at_a_time_is_cheap(fn: Callable) -> None:
    eqn = last(fn, X)
    assert is_cheap(eqn)
    assert not is_heavy(eqn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ x.T,
        lambda x: x[jnp.arange(3), jnp.arange(3)],
        lambda x: jnp.sort(x),
        lambda x: jax.lax.top_k(x, 2)[0],
        lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + 1, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y.T @ y, jnp.cos, x),
        jax.custom_jvp(lambda x: x @ x.T),
    ],
)
def test_products_and_their_like_are_heavy(fn: Callable) -> None:
    if isinstance(fn, jax.custom_jvp):
        fn.defjvps(lambda t, ans, x: t @ x.T)
    eqn = last(fn, X)
    assert is_heavy(eqn)
    assert not is_cheap(eqn)


def test_arrays_of_random_bits_are_not_cheap_but_no_work_either() -> None:
    one, many = (
        last(lambda k, shape=shape: jax.random.bits(k, shape), jax.random.key(0))
        for shape in ((), (3,))
    )
    assert (is_cheap(one), is_random(one), is_heavy(one)) == (True, False, False)
    assert (is_cheap(many), is_random(many), is_heavy(many)) == (False, True, False)


@pytest.mark.parametrize(
    ("fn", "args", "count"),
    [
        (lambda x, y: x @ y, (X, X.T), 2 * 4 * 4 * 8),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (X[None], X[None]), 2 * 4 * 4 * 8),
        (
            convolution,
            (np.ones((2, 5, 5, 3), np.float32), np.ones((3, 3, 3, 7), np.float32)),
            2 * 2 * 25 * 9 * 3 * 7,
        ),
        (
            lambda x, y: jax.lax.fori_loop(0, 5, lambda i, z: jnp.sin(z @ y @ x), x),
            (X, X.T),
            5 * 2 * (2 * 4 * 4 * 8),
        ),
        (lambda x, y: jnp.sin(x), (X, X), 0),
    ],
)
def test_flops_are_those_counted_by_hand(fn: Callable, args: Any, count: int) -> None:
    assert sum(map(flops, flatten(fn, *args).jaxpr.eqns)) == count
