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
        self.attention = nnx.MultiHeadAttention(
            num_heads=4,
            in_features=WIDTH,
            decode=False,
            rngs=rngs,
        )
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.first_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.second_norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        y = self.first_norm(x)
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(y, mask=mask)
        y = self.second_norm(x)
        y = self.wide(y)
        y = self.narrow(jax.nn.gelu(y))
        return x + y


class Adder(nnx.Module):
    def __init__(self, rngs):
        self.digits = nnx.Embed(12, WIDTH, rngs=rngs)
        self.places = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(BLOCKS))
        self.head = nnx.Linear(WIDTH, 12, rngs=rngs)

    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        places = self.places(positions)  # [tokens, WIDTH]
        x = self.digits(tokens) + places  # [batch, tokens, WIDTH]
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
    text = question + answer
    symbols = "0123456789+="
    tokens = [symbols.index(c) for c in text]
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
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        logits = jax.nn.log_softmax(adder(inputs))
        # Only the digits after the = can be predicted, so the loss counts only them.
        answer = slice(2 * DIGITS + 1, None)
        predicted = logits[:, answer]
        targets = targets[:, answer, None]
        right = jnp.take_along_axis(predicted, targets, -1)
        return -jnp.mean(right)

    def batches(self, seed, batch_size):
        numbers = grain.MapDataset.range(10**6)
        order = numbers.seed(seed).shuffle().repeat()
        examples = order.random_map(example)
        batches = examples.batch(batch_size)
        return iter(batches.to_iter_dataset())
