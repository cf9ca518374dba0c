"""A mixture of experts (arXiv:2101.03961), in which each token goes to one of several small MLPs.

A router chooses the expert of each token. With the task's loss alone, the router may learn to
choose only a few experts. So a second loss is added, which is lowest if the router chooses all
experts equally often.

python -m jvpipe.train --model examples/experts.py:experts --stages 2
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


def norm(x):
    mean_square = jnp.mean(x**2, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6)


def mixed(x, p):
    """Returns the vectors after the experts, the second loss, and each expert's share of tokens.

    The second loss is 1 if all experts are chosen equally often.

    Args:
        x: the vectors of the tokens, [..., width].
        p: the parameters of the router and of the experts.
    """
    normed = norm(x)
    chances = jax.nn.softmax(normed @ p["router"])  # [..., experts]
    experts = chances.shape[-1]
    chosen = jax.nn.one_hot(chances.argmax(-1), experts)
    # Every expert computes every token, and all results except the chosen one are multiplied by 0.
    # This is simple, and fast enough for a few small experts.
    expanded = jnp.einsum("...d,edf->...ef", normed, p["up"])
    hidden = jax.nn.gelu(expanded)
    weights = chosen * chances
    outputs = jnp.einsum(
        "...ef,efd,...e->...d",
        hidden,
        p["down"],
        weights,
    )
    # Equation 4 of the paper. Choices have no gradient, so the gradient is that of the chances.
    axes = tuple(range(x.ndim - 1))
    often = chosen.mean(axes)
    products = often * chances.mean(axes)
    uneven = experts * jnp.sum(products)
    return x + outputs, uneven, often


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

        def drawn(*shape):
            scale = shape[-2] ** -0.5
            return scale * jax.random.normal(next(keys), shape)

        def block():
            return {
                "mix": drawn(2 * D, D),
                "router": drawn(D, E),
                "up": drawn(E, D, 2 * D),
                "down": drawn(E, 2 * D, D),
            }

        return {
            "embed": drawn(V, D),
            "blocks": [block() for _ in range(self.blocks)],
            "head": drawn(D, V),
        }

    def loss_fn(self, params, batch, rng):
        x = params["embed"][batch[:, :-1]]  # [batch, tokens, width]
        uneven = 0.0
        chosen = []
        for p in params["blocks"]:
            # Each token reads only itself and the token before it, which is enough to learn a sum.
            padded = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
            before = padded[:, :-1]
            both = jnp.concatenate([norm(x), norm(before)], -1)
            mix = both @ p["mix"]
            x = x + jnp.tanh(mix)
            # The second loss is averaged over all blocks. So a cut between two stages sends this
            # number together with x.
            x, unevenly, often = mixed(x, p)
            uneven = uneven + unevenly / self.blocks
            chosen.append(often)
        logits = norm(x) @ params["head"]
        predicted = jax.nn.log_softmax(logits)
        targets = batch[:, 1:, None]
        right = jnp.take_along_axis(predicted, targets, -1)
        loss = -jnp.mean(right)
        total = loss + 0.01 * uneven
        aux = {
            "loss of the task": loss,
            "uneven": uneven,
            "chosen": jnp.stack(chosen),
        }
        return total, aux

    def batches(self, seed, batch_size):
        """Yields rows; each symbol is the sum of the two before it and the row's step."""
        generator = np.random.default_rng(seed)
        while True:
            first = generator.integers(self.symbols, size=(2, batch_size))
            rows = list(first)
            step = generator.integers(1, 4, batch_size)
            while len(rows) <= self.tokens:
                following = rows[-1] + rows[-2] + step
                rows.append(following % self.symbols)
            batch = np.stack(rows, 1)
            yield batch.astype(np.int32)


experts = Experts()
