"""Copies between devices."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jvpipe import _jax


@pytest.mark.parametrize("make", [lambda: jax.numpy.arange(5), lambda: jax.random.split(jax.random.key(0), 3)])
def test_arrays_and_keys_are_copied_to_another_device(make: Callable[[], jax.Array]) -> None:
    first, second = jax.devices()[:2]
    x = jax.device_put(make(), first)
    y = _jax.copier(second)(x)
    assert y.devices() == {second}
    assert y.dtype == x.dtype
    words = jax.random.key_data if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray
    np.testing.assert_array_equal(words(y), words(x))


def test_scopes_have_no_empty_parts() -> None:
    def model(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"), jax.named_scope(""), jax.named_scope("inner"):
            return jax.numpy.sin(x)

    assert [_jax.scope(eqn) for eqn in jax.make_jaxpr(model)(1.0).eqns] == ["outer/inner"]
