"""LoRA (arXiv:2106.09685): the base stays frozen, and small matrices beside it learn a new task.

To each matrix w of the base, the product a @ b of two narrow matrices is added. Only a and b learn.

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
        """Returns the parameters of the base, which a real program would read from a file."""
        D = self.width
        keys = jax.random.split(jax.random.key(1), self.blocks)
        return [jax.random.normal(key, (D, D)) * D**-0.5 for key in keys]

    def init(self, key):
        D, r = self.width, self.rank
        keys = jax.random.split(key, self.blocks)
        down = [jax.random.normal(k, (D, r)) * 0.1 for k in keys]
        up = [jnp.zeros((r, D))] * self.blocks  # the product is 0, so training begins at the base
        return {"base": self.base(), "lora": {"down": down, "up": up}}

    def optimizer(self, steps):
        # The updates of the base are set to zero. jvpipe sees this in the optimizer. It therefore
        # computes no gradients for the base, and keeps no moments.
        rate = optax.cosine_decay_schedule(1e-2, steps)
        learning = {"base": optax.set_to_zero(), "lora": optax.adam(rate)}
        return optax.multi_transform(learning, {"base": "base", "lora": "lora"})

    def loss_fn(self, params, batch, rng):
        base, lora = params["base"], params["lora"]
        layers = [w + a @ b for w, a, b in zip(base, lora["down"], lora["up"])]
        error = run(layers, batch["x"]) - batch["y"]
        return jnp.mean(error**2)

    def task(self):
        """Returns the function to learn: the base, with a matrix of rank 1 added to each matrix."""
        keys = jax.random.split(jax.random.key(2), self.blocks)
        pairs = [jax.random.normal(key, (2, self.width)) for key in keys]
        changes = [0.1 * jnp.outer(*pair) for pair in pairs]
        return jax.jit(lambda x: run([w + c for w, c in zip(self.base(), changes)], x))

    def batches(self, seed, batch_size):
        generator, task = np.random.default_rng(seed), self.task()
        while True:
            x = generator.normal(size=(batch_size, self.width)).astype(np.float32)
            yield {"x": x, "y": np.asarray(task(x))}


lora = Lora()
