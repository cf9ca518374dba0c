"""LoRA (arXiv:2106.09685): the base is frozen, and small products of matrices beside it learn a new task.

python -m jvpipe.train --model examples/lora.py:lora --stages 2
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


def run(layers, x):
    for w in layers:
        x = x + jnp.tanh(x @ w)
    return x


@dataclass(frozen=True)
class Lora:
    blocks: int = 6
    width: int = 64
    rank: int = 2
    batch_size = 64
    steps = 400

    def base(self):
        """What was trained before: it would be read from a file."""
        keys = jax.random.split(jax.random.key(1), self.blocks)
        return [jax.random.normal(key, (self.width, self.width)) * self.width**-0.5 for key in keys]

    def init(self, key):
        down = [
            jax.random.normal(k, (self.width, self.rank)) * 0.1
            for k in jax.random.split(key, self.blocks)
        ]
        up = [jnp.zeros((self.rank, self.width))] * self.blocks  # at first the base alone speaks
        return {"base": self.base(), "lora": {"down": down, "up": up}}

    def optimizer(self, steps):
        learning = {
            "base": optax.set_to_zero(),
            "lora": optax.adam(optax.cosine_decay_schedule(1e-2, steps)),
        }
        return optax.multi_transform(learning, {"base": "base", "lora": "lora"})

    def loss_fn(self, params, batch, rng):
        base, lora = params["base"], params["lora"]
        layers = [w + a @ b for w, a, b in zip(base, lora["down"], lora["up"])]
        return jnp.mean((run(layers, batch["x"]) - batch["y"]) ** 2)

    def task(self):
        """The new task: the base, changed by matrices of rank 1."""
        keys = jax.random.split(jax.random.key(2), self.blocks)
        change = [0.1 * jnp.outer(*jax.random.normal(key, (2, self.width))) for key in keys]
        return jax.jit(lambda x: run([w + c for w, c in zip(self.base(), change)], x))

    def batches(self, seed, batch_size):
        generator, task = np.random.default_rng(seed), self.task()
        while True:
            x = generator.normal(size=(batch_size, self.width)).astype(np.float32)
            yield {"x": x, "y": np.asarray(task(x))}


lora = Lora()
