"""Makes inputs of given shapes, on which programs run alone while they are measured."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def example_of(shape: Any) -> Any:
    """Makes an array of a shape and dtype: random floats, PRNG keys, or zeros for other dtypes.

    Floats are not zeros, because some devices compute faster with zeros than with other values.
    """
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return _keys(shape)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return np.zeros(shape.shape, shape.dtype)  # integers may be indices, and 0 is in range
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, shape.shape).astype(shape.dtype)


def _keys(shape: Any) -> jax.Array:
    """Makes an array of equal PRNG keys.

    `shape` does not name the implementation of the keys. So an abstract evaluation finds it, along
    with the shape of the integers that the keys consist of.
    """
    impl: list[Any] = []

    def words_of(keys: jax.Array) -> jax.Array:
        impl.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    words = jax.eval_shape(words_of, shape)
    ones = jnp.ones(words.shape, words.dtype)
    return jax.random.wrap_key_data(ones, impl=impl[0])
