"""Weighted is a pytree of two scalars that is told apart from a plain pair."""

import jax
import jax.numpy as jnp

from jvpipe.ir.weighted import Weighted


def test_is_a_pytree_of_its_own() -> None:
    pair = Weighted(jnp.float32(6.0), jnp.float32(3.0))
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(pair)
    assert isinstance(doubled, Weighted)
    assert (float(doubled.total), float(doubled.weight)) == (12.0, 6.0)
    assert not isinstance((pair.total, pair.weight), Weighted)
