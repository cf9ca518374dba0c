"""Copies between devices."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jvpipe import _jax

Make = Callable[[], jax.Array]
MADE: list[Make] = [
    lambda: jax.numpy.arange(5),
    lambda: jax.numpy.arange(5, dtype="bfloat16"),
    lambda: jax.numpy.arange(5, dtype="int4"),  # on the host each takes a byte
    lambda: jax.random.split(jax.random.key(0), 3),
]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("make", MADE)
def test_arrays_and_keys_are_copied_to_another_device(make: Make, prompt: bool) -> None:
    first, second = jax.devices()[:2]
    x = jax.device_put(make(), first)
    y = (_jax.prompt_copier(first, second) if prompt else _jax.copier(second))(
        jax.block_until_ready(x)
    )
    assert y.devices() == {second}
    assert y.dtype == x.dtype
    assert _words(y) == _words(x)


def test_a_prompt_copy_outlives_what_it_was_made_from() -> None:
    first, second = jax.devices()[:2]
    copy, add = _jax.prompt_copier(first, second), jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(jax.device_put(np.ones(3), first))
    y = copy(x)
    add(x)
    np.testing.assert_array_equal(y, np.ones(3))


def _words(x: jax.Array) -> bytes:
    words = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(words).tobytes()


def test_scopes_have_no_empty_parts() -> None:
    def model(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"), jax.named_scope(""), jax.named_scope("inner"):
            return jax.numpy.sin(x)

    assert [_jax.scope(eqn) for eqn in jax.make_jaxpr(model)(1.0).eqns] == ["outer/inner"]
