"""A mixture of experts (arXiv:2101.03961): each token goes to one of them, a second loss spreads the tokens.

python -m jvpipe.train --model examples/experts.py:experts --stages 2
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def mixed(x, p):
    """What the chosen expert makes of each token; how unevenly they are chosen, 1 if evenly; how often each is."""
    chances = jax.nn.softmax(norm(x) @ p["router"])
    chosen = jax.nn.one_hot(chances.argmax(-1), chances.shape[-1])
    hidden = jax.nn.gelu(jnp.einsum("...d,edf->...ef", norm(x), p["up"]))
    outputs = jnp.einsum("...ef,efd,...e->...d", hidden, p["down"], chosen * chances)
    axes = tuple(range(x.ndim - 1))
    uneven = chances.shape[-1] * jnp.sum(chosen.mean(axes) * chances.mean(axes))
    return x + outputs, uneven, chosen.mean(axes)


@dataclass(frozen=True)
class Experts:
    blocks: int = 3
    width: int = 32
    experts: int = 4
    symbols: int = 16
    tokens: int = 24
    batch_size = 64
    steps = 400
    has_aux = True

    def init(self, key):
        D, E, V = self.width, self.experts, self.symbols
        keys = iter(jax.random.split(key, 4 * self.blocks + 2))
        drawn = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
        blocks = [
            {
                "mix": drawn(2 * D, D),
                "router": drawn(D, E),
                "up": drawn(E, D, 2 * D),
                "down": drawn(E, 2 * D, D),
            }
            for _ in range(self.blocks)
        ]
        return {"embed": drawn(V, D), "blocks": blocks, "head": drawn(D, V)}

    def loss_fn(self, params, batch, rng):
        x, uneven, chosen = params["embed"][batch[:, :-1]], 0.0, []
        for p in params["blocks"]:
            before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            x = x + jnp.tanh(jnp.concatenate([norm(x), norm(before)], -1) @ p["mix"])
            x, unevenly, often = mixed(x, p)
            uneven, chosen = uneven + unevenly / self.blocks, [*chosen, often]
        predicted = jax.nn.log_softmax(norm(x) @ params["head"])
        loss = -jnp.mean(jnp.take_along_axis(predicted, batch[:, 1:, None], -1))
        return loss + 0.01 * uneven, {
            "loss of the task": loss,
            "uneven": uneven,
            "chosen": jnp.stack(chosen),
        }

    def batches(self, seed, batch_size):
        """Sums of the two symbols before, with a step that each row has for itself."""
        generator = np.random.default_rng(seed)
        while True:
            rows = [*generator.integers(self.symbols, size=(2, batch_size))]
            step = generator.integers(1, 4, batch_size)
            while len(rows) <= self.tokens:
                rows.append((rows[-1] + rows[-2] + step) % self.symbols)
            yield np.stack(rows, 1).astype(np.int32)


experts = Experts()
