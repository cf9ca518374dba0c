"""Flax NNX: a transformer that learns to add numbers, with a Grain dataset.

A checkpoint stores the position in the dataset, so a resumed run continues with the next batch.

python -m jvpipe.train --model examples/with_nnx.py:Adding --stages 2
"""

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

DIGITS, WIDTH, BLOCKS = 3, 32, 2
TOKENS = 4 * DIGITS + 3  # more than enough: 123+456=0579, for example, has 3 * DIGITS + 3 tokens


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        norms = [nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)]
        self.norms = nnx.List(norms)

    def __call__(self, x):
        y = self.norms[0](x)
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(y, mask=mask)
        y = self.norms[1](x)
        hidden = jax.nn.gelu(self.wide(y))
        return x + self.narrow(hidden)


class Adder(nnx.Module):
    def __init__(self, rngs):
        self.digits = nnx.Embed(12, WIDTH, rngs=rngs)
        self.places = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        blocks = [Block(rngs) for _ in range(BLOCKS)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(WIDTH, 12, rngs=rngs)

    def __call__(self, tokens):
        x = self.digits(tokens)
        places = jnp.arange(tokens.shape[1])
        x = x + self.places(places)  # [batch, tokens, WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def example(index, generator):
    """Returns the tokens of an addition such as 123+456=0579; + is 10 and = is 11.

    Grain passes the number of the example as `index`, which is not used.
    """
    a, b = generator.integers(10**DIGITS, size=2)
    question = f"{a:0{DIGITS}}+{b:0{DIGITS}}="
    answer = f"{a + b:0{DIGITS + 1}}"
    symbols = "0123456789+="
    tokens = [symbols.index(c) for c in question + answer]
    return np.array(tokens, np.int32)


class Adding:
    batch_size = 64
    steps = 500

    def init(self, key):
        adder = Adder(nnx.Rngs(params=key))
        return nnx.state(adder, nnx.Param)

    def loss_fn(self, params, tokens, rng):
        # This makes only the module's structure and shapes. The parameters come from `params`.
        abstract = nnx.eval_shape(lambda: Adder(nnx.Rngs(0)))
        graph, _, rest = nnx.split(abstract, nnx.Param, ...)
        adder = nnx.merge(graph, params, rest, copy=True)
        logits = jax.nn.log_softmax(adder(tokens[:, :-1]))
        # Only the digits after the = can be predicted, so the loss counts only them.
        answer = slice(2 * DIGITS + 1, None)
        predicted = logits[:, answer]
        targets = tokens[:, 1:][:, answer, None]
        right = jnp.take_along_axis(predicted, targets, -1)
        return -jnp.mean(right)

    def batches(self, seed, batch_size):
        numbers = grain.MapDataset.range(10**6).seed(seed)
        order = numbers.shuffle().repeat()
        examples = order.random_map(example)
        batches = examples.batch(batch_size)
        return iter(batches.to_iter_dataset())
