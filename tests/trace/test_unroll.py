"""A scan over stacked layers runs iteration by iteration; any other scan stays what it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import ClosedJaxpr, jaxpr_as_fun
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import jvpipe_stack_layers

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
SLICES = [np.eye(3, dtype=np.float32) * (i + 1) for i in range(4)]


def primitives(closed: ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_see_slices_counters_and_earlier_results(reverse: bool) -> None:
    def model(
        stack: jax.Array, others: jax.Array, x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def body(x: jax.Array, sliced: Any) -> tuple[jax.Array, Any]:
            w, other, i = sliced
            x = jnp.sin(x @ w) + other * i.astype(jnp.float32)
            return x, (x, i)

        x, (xs, rows) = jax.lax.scan(
            body, x, (stack.astype(jnp.float32), others, jnp.arange(4)), reverse=reverse
        )
        return x, xs, rows

    others = jnp.arange(4, dtype=jnp.float32)
    closed = flatten(
        lambda slices, *rest: model(jvpipe_stack_layers(*slices), *rest), SLICES, others, X
    )
    assert "scan" not in primitives(closed)
    assert primitives(closed).count("dot_general") == 4
    found = jaxpr_as_fun(closed)(*map(jnp.asarray, (*SLICES, others, X)))
    for ours, theirs in zip(found, model(jnp.stack(SLICES), others, jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_slices_are_read_where_they_lie() -> None:
    def model(slices: list[jax.Array], x: jax.Array) -> jax.Array:
        low = jax.jit(lambda stack: jax.lax.stop_gradient(stack.astype(jnp.bfloat16)))(
            jvpipe_stack_layers(*slices)
        )
        return jax.lax.scan(jax.checkpoint(lambda x, w: (x @ w, None)), x, low)[0]

    closed = flatten(model, SLICES, X.astype(jnp.bfloat16))
    assert sorted(set(primitives(closed))) == [
        "convert_element_type",
        "dot_general",
        "stop_gradient",
    ]


def test_a_scan_inside_a_scan_is_unrolled_with_it_or_stays() -> None:
    def model(slices: list[jax.Array], x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda x, row: (x + row[None], None), x @ w, w)[0], None

        return jax.lax.scan(body, x, jvpipe_stack_layers(*slices))[0]

    assert primitives(flatten(model, SLICES, X)) == ["dot_general", "scan"] * 4


def test_keys_are_taken_one_by_one() -> None:
    def model(slices: list[jax.Array], key: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, sliced: Any) -> tuple[jax.Array, None]:
            w, key = sliced
            return x @ w + jax.random.uniform(key, x.shape), None

        return jax.lax.scan(body, x, (jvpipe_stack_layers(*slices), jax.random.split(key, 4)))[0]

    closed = flatten(model, SLICES, jax.random.key(0), X)
    assert primitives(closed).count("dynamic_slice") == 4  # whose indices can be lifted
    (found,) = jaxpr_as_fun(closed)(*map(jnp.asarray, SLICES), jax.random.key(0), jnp.asarray(X))
    np.testing.assert_allclose(
        found, model(list(map(jnp.asarray, SLICES)), jax.random.key(0), jnp.asarray(X)), rtol=1e-6
    )


def test_whoever_wants_the_whole_stack_gets_it() -> None:
    closed = flatten(lambda slices, x: x @ jnp.sum(jvpipe_stack_layers(*slices), 0), SLICES, X)
    assert primitives(closed)[-2:] == ["reduce_sum", "dot_general"]
    (found,) = jaxpr_as_fun(closed)(*map(jnp.asarray, (*SLICES, X)))
    np.testing.assert_allclose(found, 10 * X, rtol=1e-6)


def test_a_scan_over_time_stays() -> None:
    closed = flatten(
        lambda w, xs: jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), jnp.asarray(X), xs)[0],
        SLICES[0],
        X[None],
    )
    assert primitives(closed) == ["scan"]
    counted = flatten(lambda x: jax.lax.scan(lambda h, i: (h + i, None), x, jnp.arange(3.0))[0], X)
    assert primitives(counted)[-1] == "scan"
