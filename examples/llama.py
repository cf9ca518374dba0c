"""A Llama: rotary positions, grouped queries (arXiv:2305.13245), SwiGLU, its layers under one scan.

python -m jvpipe.train --model examples/llama.py:llama --stages 2
python -m jvpipe.plan --model examples/llama.py:llama --size 8b --stages 4 --hardware h100 --compare all
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def rotated(
    x,
):  # batch, tokens, heads, width of a head: each pair of numbers turns with the position
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** -jnp.linspace(
        0, 1, x.shape[3] // 2, endpoint=False
    )
    (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


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
        L, D, F, V, K = (
            self.layers,
            self.width,
            self.hidden,
            self.vocabulary,
            self.width // self.heads * self.groups,
        )
        shapes = {
            "q": (D, D),
            "k": (D, K),
            "v": (D, K),
            "o": (D, D),
            "gate": (D, F),
            "up": (D, F),
            "down": (F, D),
        }
        keys = jax.random.split(key, len(shapes) + 2)
        drawn = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
        layers = {name: drawn(key, L, *shape) for key, (name, shape) in zip(keys, shapes.items())}
        layers |= {"attention_norm": jnp.ones((L, D)), "mlp_norm": jnp.ones((L, D))}
        return {
            "embed": drawn(keys[-2], V, D),
            "layers": layers,
            "norm": jnp.ones(D),
            "head": drawn(keys[-1], D, V),
        }

    def layer(self, x, p):
        y, split = (
            norm(x, p["attention_norm"]),
            lambda y: y.reshape(*y.shape[:2], -1, self.width // self.heads),
        )
        q, k, v = rotated(split(y @ p["q"])), rotated(split(y @ p["k"])), split(y @ p["v"])
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]
        y = norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss_fn(self, params, batch, rng):
        x, _ = jax.lax.scan(self.layer, params["embed"][batch[:, :-1]], params["layers"])
        predicted = jax.nn.log_softmax(norm(x, params["norm"]) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(predicted, batch[:, 1:, None], -1))

    def batches(self, seed, batch_size):  # of the bytes of this file: it learns to write itself
        text, generator = (
            np.frombuffer(Path(__file__).read_bytes(), np.uint8),
            np.random.default_rng(seed),
        )
        while True:
            starts = generator.integers(len(text), size=(batch_size, 1))
            yield np.take(text, starts + np.arange(self.tokens + 1), mode="wrap").astype(np.int32)


llama = Llama()
Llama.sizes = {
    "1b": Llama(16, 2048, 32, 4, 8192, 128256, 2048),
    "8b": Llama(32, 4096, 32, 8, 14336, 128256, 4096),
}
