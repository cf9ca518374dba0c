"""Plain JAX, without a library of layers: an MLP learns on which of two spirals a point lies.

The parameters are a list of dictionaries, and the loss loops over the list.

python -m jvpipe.train --model examples/plain.py:Spiral --stages 2
"""

import jax
import jax.numpy as jnp
import numpy as np


def points(generator, count):
    """Returns points near two spirals, [count, 2], and the number of each point's spiral."""
    label = generator.integers(2, size=count)
    turn = generator.uniform(0.5, 3, count)
    angle = np.pi * (turn + label)
    circle = [np.cos(angle), np.sin(angle)]
    noise = 0.1 * generator.normal(size=(2, count))
    x = turn * circle + noise
    return {
        "x": x.T.astype(np.float32),
        "label": label.astype(np.int32),
    }


class Spiral:
    batch_size = 64
    steps = 500

    def init(self, key):
        sizes = [2, 64, 64, 64, 64, 2]
        keys = jax.random.split(key, len(sizes))
        layers = []
        for k, inputs, outputs in zip(keys, sizes, sizes[1:], strict=False):
            scale = (2 / inputs) ** 0.5
            w = jax.random.normal(k, (inputs, outputs)) * scale
            b = jnp.zeros(outputs)
            layers.append({"w": w, "b": b})
        return layers

    def loss_fn(self, params, batch, rng):
        *hidden, last = params
        x = batch["x"]  # [batch, 2]
        # jvpipe may cut the model after each iteration. The cut then sends x, [batch, 64].
        for p in hidden:
            y = x @ p["w"]
            x = jax.nn.relu(y + p["b"])
        y = x @ last["w"]
        logits = jax.nn.log_softmax(y + last["b"])
        label = batch["label"][:, None]
        chosen = jnp.take_along_axis(logits, label, 1)
        return -jnp.mean(chosen)

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield points(generator, batch_size)

    def held_out(self):
        generator = np.random.default_rng(10**6)
        return [points(generator, 256)]
