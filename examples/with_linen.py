"""Flax Linen: a convolutional network whose model state is the running averages of its batch norms.

The model learns to tell full squares from outlines.

python -m jvpipe.train --model examples/with_linen.py:Shapes --stages 2
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

SIDE = 16


def pictures(generator, count):
    """Returns noisy pictures with one square each, and labels: 1 for an outline, else 0."""
    label = generator.integers(2, size=count)
    corner = generator.integers(1, 6, (2, count))
    size = generator.integers(5, 9, count)
    full = rectangles(corner, size)
    hole = rectangles(corner + 1, size - 2)
    is_outline = (label == 1)[:, None, None]
    image = full & ~(hole & is_outline)
    noise = 0.3 * generator.normal(size=(count, SIDE, SIDE, 1))
    image = image[..., None] + noise
    return {
        "image": image.astype(np.float32),
        "label": label.astype(np.int32),
    }


def rectangles(corner, size):
    """Returns which pixels lie in each picture's square, [count, SIDE, SIDE].

    Args:
        corner: the first row and the first column of each square, [2, count].
        size: the side of each square, [count].
    """
    at = np.arange(SIDE)[:, None]

    def inside(low):
        pixels = (at >= low) & (at < low + size)  # [SIDE, count]
        return pixels.T

    first_row, first_column = corner
    rows = inside(first_row)
    columns = inside(first_column)
    return rows[:, :, None] & columns[:, None]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for channels in (8, 16, 32):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))  # half the side
        x = x.mean((1, 2))
        return nn.Dense(2)(x)


class Shapes:
    batch_size = 32
    steps = 200
    has_state = True
    net = Net()

    def _variables(self, key):
        image = jnp.zeros((1, SIDE, SIDE, 1))
        return self.net.init(key, image)

    def init(self, key):
        return self._variables(key)["params"]

    def initial_state(self):
        return self._variables(jax.random.key(0))["batch_stats"]

    def optimizer(self, steps):
        rate = optax.cosine_decay_schedule(3e-3, steps)
        return optax.adam(rate)

    def loss_fn(self, params, state, batch, rng):
        variables = {
            "params": params,
            "batch_stats": state,
        }
        # The averages are an argument and a result of the loss. jvpipe gives each micro-batch the
        # averages that the previous micro-batch returned.
        logits, new = self.net.apply(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), new["batch_stats"]

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield pictures(generator, batch_size)

    def held_out(self):
        generator = np.random.default_rng(10**6)
        return [pictures(generator, 128)]
