"""Flax Linen: a convolutional network with batch norm, whose running averages are the model's state.

python -m jvpipe.train --model examples/with_linen.py:Shapes --stages 2
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

SIDE = 16


def pictures(generator, count):
    """Noisy pictures of rectangles and of their outlines."""
    label = generator.integers(2, size=count)
    low, size = generator.integers(1, 6, (2, count)), generator.integers(5, 9, count)
    at = np.arange(SIDE)[:, None]
    inside = [((at >= a) & (at < a + size)).T for a in low]
    inner = [((at > a) & (at < a + size - 1)).T for a in low]
    full, hole = (rows[:, :, None] & columns[:, None] for rows, columns in (inside, inner))
    image = full & ~(hole & (label == 1)[:, None, None])
    image = image[..., None] + 0.3 * generator.normal(size=(count, SIDE, SIDE, 1))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for channels in (8, 16, 32):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(2)(x.mean((1, 2)))


class Shapes:
    batch_size, steps, has_state = 32, 200, True
    net = Net()

    def _variables(self, key):
        return self.net.init(key, jnp.zeros((1, SIDE, SIDE, 1)))

    def init(self, key):
        return self._variables(key)["params"]

    def initial_state(self):
        return self._variables(jax.random.key(0))["batch_stats"]

    def optimizer(self, steps):
        return optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def loss_fn(self, params, state, batch, rng):
        logits, new = self.net.apply(
            {"params": params, "batch_stats": state}, batch["image"], mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), new["batch_stats"]

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield pictures(generator, batch_size)

    def held_out(self):
        return [pictures(np.random.default_rng(10**6), 128)]
