"""LoRA (arXiv:2106.09685): the base stays frozen, and small matrices beside it learn a new task.

The product a @ b of two narrow matrices is added to each matrix w of the base. Only a and b learn.

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
        drawn = [jax.random.normal(key, (D, D)) for key in keys]
        return [w * D**-0.5 for w in drawn]

    def init(self, key):
        D, r = self.width, self.rank
        keys = jax.random.split(key, self.blocks)
        down = [0.1 * jax.random.normal(k, (D, r)) for k in keys]
        up = [jnp.zeros((r, D))] * self.blocks  # the product is 0, so training begins at the base
        return {"base": self.base(), "lora": {"down": down, "up": up}}

    def optimizer(self, steps):
        # The optimizer sets the base's updates to zero. jvpipe detects this, and neither computes
        # gradients nor stores moments for the base.
        rate = optax.cosine_decay_schedule(1e-2, steps)
        learning = {
            "base": optax.set_to_zero(),
            "lora": optax.adam(rate),
        }
        labels = {"base": "base", "lora": "lora"}
        return optax.multi_transform(learning, labels)

    def loss_fn(self, params, batch, rng):
        base = params["base"]
        down = params["lora"]["down"]
        up = params["lora"]["up"]
        layers = [w + a @ b for w, a, b in zip(base, down, up)]
        y = run(layers, batch["x"])
        error = y - batch["y"]
        return jnp.mean(error**2)

    def task(self):
        """Returns the function to learn: the base, with a matrix of rank 1 added to each matrix."""
        keys = jax.random.split(jax.random.key(2), self.blocks)
        pairs = [jax.random.normal(key, (2, self.width)) for key in keys]
        outer = [jnp.outer(a, b) for a, b in pairs]
        changes = [0.1 * change for change in outer]

        @jax.jit
        def target(x):
            layers = [w + change for w, change in zip(self.base(), changes)]
            return run(layers, x)

        return target

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        task = self.task()
        shape = (batch_size, self.width)
        while True:
            x = generator.normal(size=shape).astype(np.float32)
            y = np.asarray(task(x))
            yield {"x": x, "y": y}


lora = Lora()
