"""Haiku: `hk.transform` turns a function into `init` and `apply`; rows of tokens differ in length.

The model learns whether any bracket is open after each bracket of a row. The loss is a mean over
all tokens except padding, and micro-batches differ in the number of such tokens.

python -m jvpipe.train --model examples/with_haiku.py:Brackets --stages 2
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import jvpipe

TOKENS, WIDTH = 32, 32


def brackets(generator, count):
    """Returns rows of brackets, and for each bracket whether any is open after it.

    An opening bracket is 1, a closing one is 2, and padding is 0.
    """
    length = generator.integers(4, TOKENS + 1, (count, 1))
    there = np.arange(TOKENS) < length  # [count, TOKENS]
    drawn = generator.integers(1, 3, (count, TOKENS))
    tokens = np.where(there, drawn, 0)
    steps = np.where(tokens == 1, 1, -1) * there
    depth = np.cumsum(steps, 1)
    is_open = depth > 0
    return {
        "tokens": tokens.astype(np.int32),
        "depth": is_open.astype(np.int32),
        "there": there.astype(np.float32),
    }


@hk.transform
def net(tokens):
    x = hk.Embed(3, WIDTH)(tokens)
    small = hk.initializers.RandomNormal(0.1)
    x = x + hk.get_parameter("places", [TOKENS, WIDTH], init=small)
    # A target depends only on its bracket and earlier ones, so attention does not look ahead.
    places = jnp.ones((1, 1, TOKENS, TOKENS))
    mask = jnp.tril(places)
    scaled = hk.initializers.VarianceScaling(1.0)

    def normed(x):
        norm = hk.LayerNorm(-1, create_scale=True, create_offset=True)
        return norm(x)

    for _ in range(2):
        attention = hk.MultiHeadAttention(
            4,
            WIDTH // 4,
            w_init=scaled,
            model_size=WIDTH,
        )
        y = normed(x)
        x = x + attention(y, y, y, mask)
        feed_forward = hk.nets.MLP(
            [4 * WIDTH, WIDTH],
            activation=jax.nn.gelu,
        )
        y = normed(x)
        x = x + feed_forward(y)
    y = normed(x)
    return hk.Linear(2)(y)


class Brackets:
    batch_size = 64
    steps = 300

    def init(self, key):
        tokens = jnp.zeros((1, TOKENS), jnp.int32)
        return net.init(key, tokens)

    def loss_fn(self, params, batch, rng):
        outputs = net.apply(params, rng, batch["tokens"])
        logits = jax.nn.log_softmax(outputs)
        depth = batch["depth"][..., None]
        right = jnp.take_along_axis(logits, depth, -1)
        losses = -right[..., 0]  # [batch, TOKENS]
        # Micro-batches differ in padding, so a mean of their means would be wrong. With `Weighted`,
        # jvpipe adds up sums and counts over all micro-batches before it divides.
        there = batch["there"]
        total = jnp.sum(losses * there)
        count = jnp.sum(there)
        return jvpipe.Weighted(total, count)

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield brackets(generator, batch_size)

    def held_out(self):
        generator = np.random.default_rng(10**6)
        return [brackets(generator, 256)]
