"""Small losses of many kinds, for bits: norms before products, reductions, loops, random bits,
rules of the user's.

Axes: B batch, T tokens, D model, H heads, V vocabulary, C channels, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any
B, T, D, H, V, C, G = 16, 8, 16, 2, 24, 8, 2


@dataclass(frozen=True)
class Subject:
    """A loss, its parameters, a batch and the run's key."""

    loss_fn: Callable[..., jax.Array]
    params: Tree
    batch: Tree
    rng: jax.Array | None = None


def in_bfloat16(subject: Subject) -> Subject:
    """The same, computed in bfloat16 from parameters in float32."""

    def low(tree: Tree) -> Tree:
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        return subject.loss_fn(low(params), low(batch), rng).astype(jnp.float32)

    return Subject(loss_fn, subject.params, subject.batch, subject.rng)


def _draw(seed: int) -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(seed)
    return lambda *shape: (
        rng.standard_normal(shape) / np.sqrt(shape[-2 if len(shape) > 1 else 0])
    ).astype(np.float32)


def _pairs(*shape: int) -> Tree:
    draw = _draw(1)
    return {"x": 3 * draw(*shape), "y": draw(*shape)}


def _tokens() -> Tree:
    rng = np.random.default_rng(2)
    return {name: rng.integers(0, V, (B, T), np.int32) for name in ("tokens", "targets")}


def _mean_square(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x - y) ** 2)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


# Norms


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def unit_by_rsqrt(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def layer_norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    return (
        (x - jnp.mean(x, -1, keepdims=True))
        / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-6)
        * scale
    )


def rms_norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.reshape(*x.shape[:-1], G, -1)
    mean, var = jnp.mean(y, (1, 2, 4), keepdims=True), jnp.var(y, (1, 2, 4), keepdims=True)
    return ((y - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale


def batch_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x - jnp.mean(x, (0, 1, 2))) * lax.rsqrt(jnp.var(x, (0, 1, 2)) + 1e-5) * scale


# Families


def contrastive(norm: Callable[..., jax.Array]) -> Subject:
    draw = _draw(3)
    params = {
        **{name: [draw(D, 2 * D), draw(2 * D, D)] for name in "xy"},
        "temperature": np.ones(1, np.float32),
    }

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x, y = (norm(jax.nn.gelu(batch[n] @ params[n][0]) @ params[n][1]) for n in "xy")
        similarity = (x @ y.T) * jnp.exp(params["temperature"])
        return jnp.mean(jax.nn.logsumexp(similarity, -1) - jnp.diagonal(similarity)) + jnp.mean(
            jax.nn.logsumexp(similarity, 0) - jnp.diagonal(similarity)
        )

    return Subject(loss_fn, params, _pairs(B, D))


def mixer(norm: Callable[..., jax.Array]) -> Subject:
    draw = _draw(4)
    params = [
        {
            "g": 1 + draw(D),
            "t": [draw(T, 2 * T), draw(2 * T, T)],
            "h": 1 + draw(D),
            "c": [draw(D, 2 * D), draw(2 * D, D)],
        }
        for _ in range(2)
    ]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            y = jnp.swapaxes(norm(x, p["g"]), 1, 2)
            x = x + jnp.swapaxes(jax.nn.gelu(y @ p["t"][0]) @ p["t"][1], 1, 2)
            x = x + jax.nn.gelu(norm(x, p["h"]) @ p["c"][0]) @ p["c"][1]
        return _mean_square(x, batch["y"])

    return Subject(loss_fn, params, _pairs(B, T, D))


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def decoder(
    norm: Callable[..., jax.Array],
    *,
    rope: bool = False,
    unit_keys: bool = False,
    stacked: str = "",
    remat: bool = False,
) -> Subject:
    """A causal decoder with gated MLPs, tied; stacked for a scan over `slices` or for one over an
    `index`.
    """
    draw = _draw(5)
    shapes = {
        **dict.fromkeys("qkvo", (D, D)),
        "up": (D, 2 * D),
        "gate": (D, 2 * D),
        "down": (2 * D, D),
    }
    blocks = [
        {n: draw(*s) for n, s in shapes.items()} | {"g": 1 + draw(D), "h": 1 + draw(D)}
        for _ in range(2)
    ]
    params: Tree = {"embedding": draw(V, D), "g": 1 + draw(D)}
    params["blocks"] = (
        jax.tree.map(lambda *slices: np.stack(slices), *blocks) if stacked else blocks
    )

    def block(p: Tree, x: jax.Array) -> jax.Array:
        q, k, v = ((norm(x, p["g"]) @ p[n]).reshape(*x.shape[:2], H, D // H) for n in "qkv")
        q, k = (unit(q), unit(k)) if unit_keys else (q, k)
        q, k = (_rotated(q), _rotated(k)) if rope else (q, k)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (D // H) ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9))
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["o"]
        y = norm(x, p["h"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x, run = params["embedding"][batch["tokens"]], jax.checkpoint(block) if remat else block
        if stacked == "slices":
            x, _ = lax.scan(lambda x, p: (run(p, x), None), x, params["blocks"])
        elif stacked == "index":
            at = lambda i: jax.tree.map(lambda a: a[i], params["blocks"])  # noqa: E731
            x, _ = lax.scan(lambda x, i: (run(at(i), x), None), x, jnp.arange(2))
        else:
            for p in params["blocks"]:
                x = run(p, x)
        return _cross_entropy(norm(x, params["g"]) @ params["embedding"].T, batch["targets"])

    return Subject(loss_fn, params, _tokens())


def convolutions(norm: Callable[..., jax.Array], *, norm_first: bool) -> Subject:
    draw = _draw(6)
    kernel = lambda k, a, b: draw(k * k * a, b).reshape(k, k, a, b)  # noqa: E731
    params = {
        "stem": kernel(3, 3, C),
        "blocks": [
            {"g": 1 + draw(C), "w": kernel(3, C, C), "h": 1 + draw(C), "u": kernel(3, C, C)}
            for _ in range(2)
        ],
        "head": draw(C, 5),
    }

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = convolved(batch["x"], params["stem"])
        for p in params["blocks"]:
            if norm_first:
                y = convolved(jax.nn.silu(norm(x, p["g"])), p["w"])
                x = x + convolved(jax.nn.relu(norm(y, p["h"])), p["u"])
            else:
                y = jax.nn.silu(norm(convolved(x, p["w"]), p["g"]))
                x = jax.nn.relu(x + norm(convolved(y, p["u"]), p["h"]))
        x = lax.reduce_window(
            x, np.array(-np.inf, x.dtype), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
        )
        return _cross_entropy(jnp.mean(x, (1, 2)) @ params["head"], batch["label"])

    return Subject(
        loss_fn, params, {"x": 10 * draw(B, 8, 8, 3), "label": np.arange(B, dtype=np.int32) % 5}
    )


def random(kind: str, impl: str) -> Subject:
    draw = _draw(7)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for i, p in enumerate(params):
            x, key = jax.nn.relu(x @ p["w"] + p["b"]), jax.random.fold_in(rng, i)
            if kind == "dropout":
                x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
            elif kind == "normal":
                x = x * (1 + 0.3 * jax.random.normal(key, x.shape, x.dtype))
            else:
                x = x * jax.nn.softmax(jax.random.gumbel(key, x.shape, x.dtype))
        return _mean_square(x, batch["y"])

    params = [{"w": draw(D, D), "b": draw(D)} for _ in range(3)]
    return Subject(loss_fn, params, _pairs(B, D), jax.random.key(0, impl=impl))


def repeated(step: Callable[[jax.Array, Tree], jax.Array], depth: int = 3) -> Subject:
    """One step after another, each with two products and a bias to use."""
    draw = _draw(8)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = step(x, p)
        return _mean_square(x, batch["y"])

    params = [{"w": draw(D, D), "b": draw(D), "u": draw(D, D)} for _ in range(depth)]
    return Subject(loss_fn, params, _pairs(B, D))


def recurrent(*, remat: bool) -> Subject:
    draw = _draw(9)
    params = [{"i": draw(D, D), "s": draw(D, D), "g": 1 + draw(D)} for _ in range(2)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = jnp.swapaxes(batch["x"], 0, 1)
        for p in params:

            def cell(h: jax.Array, x: jax.Array, p: Tree = p) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(rms_norm(x, p["g"]) @ p["i"] + unit(h + 1) @ p["s"])
                return h, h

            _, x = lax.scan(jax.checkpoint(cell) if remat else cell, jnp.zeros_like(x[0]), x)
        return _mean_square(jnp.swapaxes(x, 0, 1), batch["y"])

    return Subject(loss_fn, params, _pairs(B, T, D))


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (0.5 * g @ saved[1].T, saved[0].T @ g)
)


@jax.custom_vjp
def _normalized_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return layer_norm(x) @ w


def _normalized_forward(
    x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rows = layer_norm(x)
    return rows @ w, (rows, w)


_normalized_product.defvjp(
    _normalized_forward, lambda saved, g: (0.1 * g @ saved[1].T, saved[0].T @ g)
)

_STEPS: dict[str, Callable[[jax.Array, Tree], jax.Array]] = {
    "product with a rule": lambda x, p: x + jnp.tanh(_product(layer_norm(x), p["w"]) + p["b"]),
    "norm and product with a rule": lambda x, p: (
        x + jnp.tanh(_normalized_product(x, p["w"]) + p["b"])
    ),
    "cosine attention": lambda x, p: (
        x + jax.nn.softmax(10 * unit(x @ p["w"]) @ unit(x @ p["u"]).T) @ x
    ),
    "softmax": lambda x, p: x + jax.nn.softmax(x @ p["w"]) @ p["u"],
    "cumsum": lambda x, p: x + jnp.tanh(layer_norm(jnp.cumsum(x @ p["w"], -1)) @ p["u"]),
    "sort": lambda x, p: x + jnp.sort(layer_norm(x @ p["w"]), -1) @ p["u"],
    "top-k": lambda x, p: x + lax.top_k(jax.nn.softmax(x @ p["w"]), 4)[0] @ p["u"][:4],
    "gather": lambda x, p: x + layer_norm(x @ p["w"])[jnp.argsort(x[:, 0])] @ p["u"],
    "scatter": lambda x, p: x.at[:2].add(layer_norm(x @ p["w"])[1:3]) @ p["u"],
    "einsum": lambda x, p: (
        x + 0.1 * jnp.einsum("bi,bj,ij,jk->bk", layer_norm(x), jnp.tanh(x), p["w"], p["u"])
    ),
    "distances": lambda x, p: (
        jnp.exp(-jnp.sum((x[:, None] - unit(x @ p["w"])[None]) ** 2, -1)) @ x @ p["u"]
    ),
    "unit weights": lambda x, p: (
        x + jnp.tanh(x @ (unit(p["w"].T).T * p["b"]) + p["b"]) @ unit(p["u"])
    ),
    "covariance": lambda x, p: (
        x + (layer_norm(x).T @ layer_norm(x) / len(x) @ p["w"] @ layer_norm(x).T).T
    ),
    "spectrum": lambda x, p: (
        x + layer_norm(jnp.fft.fft(x.astype(jnp.float32)).real).astype(x.dtype) @ p["w"]
    ),
    "branches": lambda x, p: lax.cond(
        jnp.sum(x) > 0,
        lambda x: jnp.tanh(unit(x) @ p["w"]),
        lambda x: jnp.sin(layer_norm(x) @ p["w"]),
        x,
    ),
    "loop": lambda x, p: lax.fori_loop(
        0, 3, lambda i, x: jnp.tanh(layer_norm(x) @ p["w"] + p["b"]), x
    ),
}

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "contrastive": partial(contrastive, unit),
    "contrastive by rsqrt": partial(contrastive, unit_by_rsqrt),
    "mixer": partial(mixer, layer_norm),
    "decoder, stacked, remat": partial(decoder, layer_norm, stacked="slices", remat=True),
    "decoder, indexed, remat": partial(decoder, layer_norm, stacked="index", remat=True),
    "decoder, RMS norm, rotary": partial(decoder, rms_norm, rope=True),
    "decoder, unit keys": partial(decoder, layer_norm, unit_keys=True),
    "group norm first": partial(convolutions, group_norm, norm_first=True),
    "group norm last": partial(convolutions, group_norm, norm_first=False),
    "batch norm first": partial(convolutions, batch_norm, norm_first=True),
    "recurrent": partial(recurrent, remat=False),
    "recurrent, remat": partial(recurrent, remat=True),
    **{
        f"{kind}, {impl}": partial(random, kind, impl)
        for kind in ("dropout", "normal")
        for impl in ("rbg", "unsafe_rbg")
    },
    "gumbel, unsafe_rbg": partial(random, "gumbel", "unsafe_rbg"),
    **{name: partial(repeated, step) for name, step in _STEPS.items()},
}
