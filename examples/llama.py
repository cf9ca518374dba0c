"""A Llama: rotary positions, grouped queries (arXiv:2305.13245), SwiGLU, one scan over all layers.

The second command needs no GPU. It plans the 8b size for four H100s.

python -m jvpipe.train --model examples/llama.py:llama --stages 2
python -m jvpipe.plan --model examples/llama.py:llama --size 8b --stages 4 --hardware h100 --batch-size 16
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, scale):
    mean_square = jnp.mean(x**2, -1, keepdims=True)
    return scale * x * jax.lax.rsqrt(mean_square + 1e-6)


def rotated(x):
    """Rotates pairs in x, [batch, tokens, heads, head's width], the further the later the token."""
    positions = jnp.arange(x.shape[1])[:, None, None]
    rates = 1e4 ** -jnp.linspace(0, 1, x.shape[3] // 2, endpoint=False)
    angles = positions * rates  # [tokens, 1, pairs]
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first = a * cos - b * sin
    second = a * sin + b * cos
    return jnp.concatenate([first, second], -1)


@dataclass(frozen=True)
class Llama:
    layers: int = 4
    width: int = 64
    heads: int = 4
    groups: int = 2
    hidden: int = 176
    vocabulary: int = 256
    tokens: int = 64

    def init(self, key):
        L, D, F, V = self.layers, self.width, self.hidden, self.vocabulary
        K = D // self.heads * self.groups  # the heads of a group share their keys and values
        attention = {"q": (D, D), "k": (D, K), "v": (D, K), "o": (D, D)}
        mlp = {"gate": (D, F), "up": (D, F), "down": (F, D)}
        shapes = attention | mlp
        keys = jax.random.split(key, len(shapes) + 2)
        drawn = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
        # The scan needs the parameters of all layers in one array each, [layers, ...].
        layers = {name: drawn(key, L, *shapes[name]) for key, name in zip(keys, shapes)}
        layers["attention_norm"] = jnp.ones((L, D))
        layers["mlp_norm"] = jnp.ones((L, D))
        ends = {"embed": drawn(keys[-2], V, D), "norm": jnp.ones(D)}
        return {**ends, "layers": layers, "head": drawn(keys[-1], D, V)}

    def layer(self, x, p):
        y = norm(x, p["attention_norm"])  # [batch, tokens, width]
        head = self.width // self.heads
        split = lambda y: y.reshape(*y.shape[:2], -1, head)
        q = rotated(split(y @ p["q"]))  # [batch, tokens, heads, width of a head]
        k = rotated(split(y @ p["k"]))  # [batch, tokens, groups, width of a head]
        v = split(y @ p["v"])
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ p["o"]
        y = norm(x, p["mlp_norm"])
        gate = jax.nn.silu(y @ p["gate"])
        hidden = gate * (y @ p["up"])
        return x + hidden @ p["down"], None

    def loss_fn(self, params, batch, rng):
        x = params["embed"][batch[:, :-1]]
        # One scan runs all layers. jvpipe divides the scan where it cuts the model.
        x, _ = jax.lax.scan(self.layer, x, params["layers"])
        x = norm(x, params["norm"])
        logits = x @ params["head"]
        predicted = jax.nn.log_softmax(logits)
        targets = batch[:, 1:, None]
        chosen = jnp.take_along_axis(predicted, targets, -1)
        return -jnp.mean(chosen)

    def batches(self, seed, batch_size):
        """Yields pieces of this file as bytes, so the model learns to write its own code."""
        text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
        generator = np.random.default_rng(seed)
        while True:
            starts = generator.integers(len(text), size=(batch_size, 1))
            places = starts + np.arange(self.tokens + 1)
            rows = np.take(text, places, mode="wrap")
            yield rows.astype(np.int32)


llama = Llama()
Llama.sizes = {
    "1b": Llama(16, 2048, 32, 4, 8192, 128256, 2048),
    "8b": Llama(32, 4096, 32, 8, 14336, 128256, 4096),
}
