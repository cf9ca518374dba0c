"""Plain functions: parameters are a list of dictionaries, the loss is a loop over them.

python -m jvpipe.train --model examples/plain.py:Spiral --stages 2
"""

import jax
import jax.numpy as jnp
import numpy as np


def points(generator, count):
    """Points on two spirals, and which of the two each is on."""
    label = generator.integers(2, size=count)
    turn = generator.uniform(0.5, 3, count)
    angle = np.pi * (turn + label)
    x = turn * np.stack([np.cos(angle), np.sin(angle)]) + 0.1 * generator.normal(size=(2, count))
    return {"x": x.T.astype(np.float32), "label": label.astype(np.int32)}


class Spiral:
    batch_size, steps = 64, 500

    def init(self, key):
        sizes = [2, 64, 64, 64, 64, 2]
        keys = jax.random.split(key, len(sizes))
        return [
            {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
            for k, n, m in zip(keys, sizes, sizes[1:], strict=False)
        ]

    def loss_fn(self, params, batch, rng):
        *hidden, last = params
        x = batch["x"]
        for p in hidden:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        logits = jax.nn.log_softmax(x @ last["w"] + last["b"])
        return -jnp.mean(jnp.take_along_axis(logits, batch["label"][:, None], 1))

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield points(generator, batch_size)

    def held_out(self):
        return [points(np.random.default_rng(10**6), 256)]
