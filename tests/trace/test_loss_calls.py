"""What a loss of other arguments is told."""

import jax
import numpy as np
import optax
import pytest

import jvpipe


def test_a_loss_that_takes_the_key_for_its_targets_is_told_how_it_is_called() -> None:
    def loss_fn(params: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((x @ params - y) ** 2).mean()

    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=1, devices=jax.devices()[:1])
    batch = (np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))
    with pytest.raises(TypeError) as error:
        pipe.init(np.ones((3, 2), np.float32), batch, jax.random.key(0))
    assert "lambda params, batch, rng: loss(params, *batch)" in error.value.__notes__[-1]
