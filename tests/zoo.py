"""Small losses of every kind that jvpipe must cut, each with parameters and a batch.

Axes: B batch, T tokens, D model, H heads, V vocabulary, C channels, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvpipe.ir.weighted import Weighted

Tree = Any
B, T, D, H, V, C, E = 4, 6, 8, 2, 12, 4, 3


@dataclass(frozen=True)
class Case:
    """A loss with what it needs."""

    loss_fn: Callable[..., Any]
    params: Tree
    batch: Tree
    rng: jax.Array | None = None
    state: Tree = None
    has_aux: bool = False
    has_state: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `trace_loss` and `Pipeline`."""
        return {"has_aux": self.has_aux, "has_state": self.has_state}


def draws(seed: int) -> Callable[..., np.ndarray]:
    """A source of float32 arrays of a given shape, of unit variance after a product."""
    rng = np.random.default_rng(seed)
    return lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def quick_key(seed: int) -> jax.Array:
    """A key whose programs compile quickly: those of threefry take seconds."""
    return jax.random.key(seed, impl="unsafe_rbg")


def mean_square(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x - y) ** 2)


def regression_batch(*shape: int) -> dict[str, np.ndarray]:
    draw = draws(1)
    return {"x": 2 * draw(*shape), "y": draw(*shape)}


def in_bfloat16(case: Case) -> Case:
    """The same loss, computed in bfloat16 from float32 parameters that are all cast at its top."""

    def cast(dtype: Any) -> Callable[[Tree], Tree]:
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return lambda tree: jax.tree.map(lambda x: x.astype(dtype) if inexact(x) else x, tree)

    low, high = cast(jnp.bfloat16), cast(jnp.float32)

    def loss_fn(params: Tree, *rest: Any) -> Any:
        *state, batch, rng = rest
        return high(case.loss_fn(low(params), *low(state), low(batch), rng))

    return replace(case, loss_fn=loss_fn)


# Plain functions


def mlp(depth: int = 5, act: Callable = jnp.tanh) -> Case:
    draw = draws(0)
    params = [{"w": draw(D, D), "b": draw(D)} for _ in range(depth)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = act(x @ p["w"] + p["b"][None])
        return mean_square(x, batch["y"])

    return Case(loss_fn, params, regression_batch(B, D))


def norm(p: Tree, x: jax.Array) -> jax.Array:
    centered = x - jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)
    return centered * scale * p["scale"][None, None] + p["bias"][None, None]


def attention(p: Tree, x: jax.Array, mask: jax.Array) -> jax.Array:
    b, t, d = x.shape
    q, k, v = (jnp.einsum("btd,de->bte", x, p[n]).reshape(b, t, H, d // H) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (d // H) ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d) @ p["o"]


def feed_forward(p: Tree, x: jax.Array) -> jax.Array:
    return (
        jax.nn.gelu(x @ p["up"] + p["up_bias"][None, None]) @ p["down"] + p["down_bias"][None, None]
    )


def dropout(x: jax.Array, key: Any, rate: float = 0.2) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def transformer_params(blocks: int) -> Tree:
    draw = draws(2)

    def block() -> Tree:
        ones, zeros = np.ones(D, np.float32), np.zeros(D, np.float32)
        return {
            "attention": {n: draw(D, D) for n in "qkvo"},
            "attention_norm": {"scale": ones, "bias": zeros},
            "mlp": {
                "up": draw(D, 2 * D),
                "up_bias": draw(2 * D),
                "down": draw(2 * D, D),
                "down_bias": draw(D),
            },
            "mlp_norm": {"scale": ones, "bias": zeros},
        }

    return {
        "embedding": draw(V, D),
        "positions": draw(T, D),
        "blocks": [block() for _ in range(blocks)],
        "norm": {"scale": np.ones(D, np.float32), "bias": np.zeros(D, np.float32)},
    }


def token_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "tokens": rng.integers(0, V, (B, T), np.int32),
        "targets": rng.integers(0, V, (B, T), np.int32),
        "lengths": rng.integers(2, T + 1, B, np.int32),
    }


def keys_by(how: str | None, rng: Any, count: int) -> list[Any]:
    """A key for each of so many layers, made in one of the usual ways."""
    match how:
        case "fold_in":
            return [jax.random.fold_in(rng, i) for i in range(count)]
        case "split":
            return list(jax.random.split(rng, count))
        case "chain":
            found = []
            for _ in range(count):
                rng, key = jax.random.split(rng)
                found.append(key)
            return found
        case _:
            return [None] * count


def dropped(how: str, rng: jax.Array, depth: int = 4) -> Case:
    """An MLP with dropout."""

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p, key in zip(params, keys_by(how, rng, depth), strict=True):
            x = dropout(jax.nn.relu(x @ p["w"] + p["b"][None]), key)
        return mean_square(x, batch["y"])

    return Case(loss_fn, mlp(depth).params, regression_batch(B, D), rng)


def transformer(blocks: int = 2, *, pre_norm: bool = True, keys: str | None = "fold_in") -> Case:
    """A tied transformer with a mask from the batch and dropout."""

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        mask = jnp.arange(T)[None] < batch["lengths"][:, None]
        x = params["embedding"][batch["tokens"]] + params["positions"][None]
        found = keys_by(keys, rng, 2 * blocks)
        for p, k0, k1 in zip(params["blocks"], found[::2], found[1::2], strict=True):
            if pre_norm:
                x = x + dropout(attention(p["attention"], norm(p["attention_norm"], x), mask), k0)
                x = x + dropout(feed_forward(p["mlp"], norm(p["mlp_norm"], x)), k1)
            else:
                x = norm(p["attention_norm"], x + dropout(attention(p["attention"], x, mask), k0))
                x = norm(p["mlp_norm"], x + dropout(feed_forward(p["mlp"], x), k1))
        logits = (norm(params["norm"], x) @ params["embedding"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[
            ..., 0
        ]
        return -jnp.sum(jnp.where(mask, picked, 0)) / jnp.sum(mask, dtype=jnp.float32)

    return Case(loss_fn, transformer_params(blocks), token_batch(), quick_key(7) if keys else None)


def scanned(blocks: int = 3) -> Case:
    """Feed-forward blocks stacked for a scan over them, with a remat and dropout inside and
    something from each.
    """
    draw = draws(10)
    ones, zeros = np.ones((blocks, D), np.float32), np.zeros((blocks, D), np.float32)
    stacked = {
        "w": np.stack([draw(D, D) for _ in range(blocks)]),
        "norm": {"scale": ones, "bias": zeros},
    }
    params = {"inputs": draw(D, D), "blocks": stacked, "head": draw(D, V)}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, jax.Array]:
            p, i = layer
            y = jax.nn.relu(norm(p["norm"], x) @ p["w"])
            return x + dropout(y, jax.random.fold_in(rng, i)), jnp.mean(x)

        x, means = jax.lax.scan(
            block, batch["x"] @ params["inputs"], (params["blocks"], jnp.arange(blocks))
        )
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1)) + jnp.sum(means**2)

    return Case(loss_fn, params, regression_batch(B, T, D), quick_key(7))


def convolution(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p: Tree, s: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    new = {"mean": 0.9 * s["mean"] + 0.1 * mean, "var": 0.9 * s["var"] + 0.1 * var}
    y = (x - mean[None, None, None]) * jax.lax.rsqrt(var + 1e-5)[None, None, None]
    return y * p["scale"][None, None, None] + p["bias"][None, None, None], new


def resnet(blocks: int = 2, halve_every: int = 2) -> Case:
    """Convolutions with batch norm; some blocks halve the image and project their shortcut."""
    draw = draws(4)
    bn = lambda c: {"scale": np.ones(c, np.float32), "bias": np.zeros(c, np.float32)}  # noqa: E731
    stats = lambda c: {"mean": np.zeros(c, np.float32), "var": np.ones(c, np.float32)}  # noqa: E731
    kernel = lambda k, a, b: draw(k * k * a, b).reshape(k, k, a, b)  # noqa: E731
    params: Tree = {"stem": kernel(3, 3, C), "blocks": [], "head": draw(C, 5)}
    state: Tree = []
    for i in range(blocks):
        params["blocks"].append(
            {"conv1": kernel(3, C, C), "bn1": bn(C), "conv2": kernel(3, C, C), "bn2": bn(C)}
        )
        if i % halve_every == halve_every - 1:
            params["blocks"][-1]["shortcut"] = kernel(1, C, C)
        state.append({"bn1": stats(C), "bn2": stats(C)})

    def loss_fn(params: Tree, state: Tree, batch: Tree, rng: Any) -> tuple[jax.Array, Tree]:
        x, new = convolution(batch["x"], params["stem"]), []
        for p, s in zip(params["blocks"], state, strict=True):
            stride = 2 if "shortcut" in p else 1
            y, s1 = batch_norm(p["bn1"], s["bn1"], convolution(x, p["conv1"], stride))
            y, s2 = batch_norm(p["bn2"], s["bn2"], convolution(jax.nn.relu(y), p["conv2"]))
            new.append({"bn1": s1, "bn2": s2})
            x = jax.nn.relu(y + (convolution(x, p["shortcut"], stride) if stride > 1 else x))
        logits = jnp.mean(x, (1, 2)) @ params["head"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], -1)
        return -jnp.mean(picked), new

    batch = {"x": draw(B, 8, 8, 3), "label": np.arange(B, dtype=np.int32)}
    return Case(loss_fn, params, batch, state=state, has_state=True)


def unet(depth: int = 3) -> Case:
    """A long skip from each level on the way down to the same level on the way up."""
    draw = draws(5)
    params = {
        "down": [draw(D, D) for _ in range(depth)],
        "middle": draw(D, D),
        "up": [draw(2 * D, D) for _ in range(depth)],
    }

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x, skips = batch["x"], []
        for w in params["down"]:
            x = jnp.tanh(x @ w)
            skips.append(x)
        x = jnp.tanh(x @ params["middle"])
        for w in params["up"]:
            x = jnp.tanh(jnp.concatenate([x, skips.pop()], -1) @ w)
        return mean_square(x, batch["y"])

    return Case(loss_fn, params, regression_batch(B, D))


def three_readers(depth: int = 6) -> Case:
    """The first layer's result is read again by three later layers: a skip across two cuts, and two
    more.
    """
    base = mlp(depth)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = first = jnp.tanh(batch["x"] @ params[0]["w"])
        for i, p in enumerate(params[1:]):
            x = jnp.tanh(x @ p["w"] + p["b"][None]) + (first * (i + 1.0) if i in (1, 2, 4) else 0.0)
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn)


def integers() -> Case:
    """Positions and masks that depend on activations, read in later layers."""
    base = mlp(6)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        where = jnp.zeros((B,), jnp.int32)
        positive = jnp.ones((B, D), bool)
        for i, p in enumerate(params):
            x = jnp.tanh(x @ p["w"] + p["b"][None])
            if i == 1:
                where, positive = jnp.argmax(x, -1), x > 0
            if i == 4:
                x = jnp.where(positive, x, 0.5 * x) + jnp.take_along_axis(x, where[:, None], 1)
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn)


def cond() -> Case:
    """A branch that depends on activations."""
    base = mlp(4)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = jax.lax.cond(
                jnp.sum(x) > 0,
                lambda x, p: jnp.tanh(x @ p["w"]),
                lambda x, p: jnp.sin(x @ p["w"] + p["b"][None]),
                x,
                p,
            )
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn)


def recurrent() -> Case:
    """Two stacked recurrent layers, each a scan over time."""
    draw = draws(6)
    params = [{"input": draw(D, D), "state": draw(D, D)} for _ in range(3)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = jnp.swapaxes(batch["x"], 0, 1)
        for p in params:

            def cell(h: jax.Array, x: jax.Array, p: Tree = p) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(x @ p["input"] + h @ p["state"])
                return h, h

            _, x = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
        return mean_square(jnp.swapaxes(x, 0, 1), batch["y"])

    return Case(loss_fn, params, regression_batch(B, T, D))


def loops() -> Case:
    """A fori_loop over powers, a while_loop over integers, and one over activations that no
    gradient enters.
    """
    base = mlp(4)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        count = jax.lax.while_loop(lambda n: n < batch["limit"][0], lambda n: 2 * n, jnp.int32(1))
        for p in params:
            x = jax.lax.fori_loop(0, 3, lambda i, x, p=p: jnp.tanh(x @ p["w"] + p["b"][None]), x)
            size = jax.lax.while_loop(
                lambda y: jnp.max(jnp.abs(y)) > 0.1, lambda y: y / 2, jax.lax.stop_gradient(x)
            )
            x = x + size
        return mean_square(x, batch["y"]) * count.astype(x.dtype)

    return replace(base, loss_fn=loss_fn, batch=base.batch | {"limit": np.full(B, 5, np.int32)})


def experts() -> Case:
    """A mixture of experts: the two best of E by a router, in every block."""
    draw = draws(7)
    params = [{"router": draw(D, E), "in": draw(D, E * D).reshape(E, D, D)} for _ in range(3)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
            everyone = jnp.einsum("bd,edf->bef", x, p["in"])
            picked = jnp.take_along_axis(everyone, chosen[..., None], 1)
            x = x + jnp.tanh(jnp.einsum("bk,bkf->bf", gates, picked))
        return mean_square(x, batch["y"])

    return Case(loss_fn, params, regression_batch(B, D))


def one_hot() -> Case:
    """An embedding by a product with one-hot vectors, tied to the output."""
    draw = draws(8)
    params = {"embedding": draw(V, D), "hidden": [draw(D, D) for _ in range(3)]}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = (
            jax.nn.one_hot(batch["tokens"], V, dtype=params["embedding"].dtype)
            @ params["embedding"]
        )
        for w in params["hidden"]:
            x = jax.nn.silu(x @ w)
        logits = x @ params["embedding"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.max(logits, -1))

    return Case(loss_fn, params, token_batch())


@jax.custom_vjp
def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose gradient is halved on its way back, unlike that of any jaxpr."""
    return x @ w


def _scaled_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ w, (x, w)


def _scaled_backward(
    saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return g @ (0.5 * w.T), (0.5 * x.T) @ g


scaled.defvjp(_scaled_forward, _scaled_backward)


TINTS = np.linspace(0.5, 1.5, D, dtype=np.float32)


@jax.custom_vjp
def tinted(x: jax.Array) -> jax.Array:
    """A scaling by a table that the function closes over, as its derivative does with another."""
    return x * TINTS[None]


tinted.defvjp(lambda x: (tinted(x), None), lambda _, g: (g * TINTS[None, ::-1],))


def spectral(depth: int = 4) -> Case:
    """Complex filters between Fourier transforms, behind tables in custom derivatives."""
    base, draw = mlp(depth), draws(11)
    params = [
        {"w": p["w"], "filter": (draw(D) + 1j * draw(D)).astype(np.complex64)} for p in base.params
    ]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = tinted(jnp.fft.ifft(jnp.fft.fft(jnp.tanh(x @ p["w"])) * p["filter"][None]).real)
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn, params=params)


@jax.custom_jvp
def clipped(x: jax.Array) -> jax.Array:
    """A clip that lets half of the gradient through where it clips."""
    return jnp.clip(x, -0.3, 0.3)


@clipped.defjvp
def _clipped_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return clipped(x), jnp.where(jnp.abs(x) < 0.3, t, 0.5 * t)


def custom_rules() -> Case:
    """Custom derivatives of the user and of jax.nn."""
    base = mlp(5)
    acts = [jax.nn.relu, jax.nn.silu, jax.nn.gelu, clipped, jax.nn.softplus]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p, act in zip(params, acts, strict=True):
            x = act(scaled(x, p["w"]) + p["b"][None])
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn)


def nested() -> Case:
    """Jit inside jit, jax.checkpoint of the user with a policy, stop_gradient in the middle."""
    base = mlp(4)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def block(p: Tree, x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: jax.jit(jnp.tanh)(x @ p["w"]) + p["b"][None])(x)

    @jax.jit
    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = block(p, x) + jax.lax.stop_gradient(0.1 * x)
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn)


def with_aux() -> Case:
    """A weighted loss, and beside it arrays, integers and another weighted mean from several
    places.
    """
    base = transformer(1, keys=None)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> tuple[Weighted, Tree]:
        mask = jnp.arange(T)[None] < batch["lengths"][:, None]
        loss = base.loss_fn(params, batch, rng)
        count = jnp.sum(mask).astype(jnp.float32)
        early = jnp.sum(params["embedding"][batch["tokens"]] ** 2, -1)
        longest = jnp.max(batch["lengths"])
        aux = {
            "early": early,
            "right": Weighted(loss * 2, count),
            "loss": loss,
            "longest": longest,
            "mask": mask,
        }
        return Weighted(loss * count, count), aux

    return replace(base, loss_fn=loss_fn, has_aux=True)


def unused() -> Case:
    """A parameter that the loss never reads, one read through stop_gradient alone, one read only by
    aux.
    """
    base = mlp(4)
    draw = draws(9)
    params = {"layers": base.params, "never": draw(3), "stopped": draw(D), "watched": draw(D)}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> tuple[jax.Array, jax.Array]:
        x = batch["x"] * jax.lax.stop_gradient(params["stopped"])[None]
        return base.loss_fn(params["layers"], batch | {"x": x}, rng), jnp.sum(params["watched"] * 2)

    return replace(base, loss_fn=loss_fn, params=params, has_aux=True)


def regularised() -> Case:
    """The squares of all parameters are added to the loss."""
    base = mlp(5)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        squares = [jnp.sum(p**2) for p in jax.tree.leaves(params)]
        return base.loss_fn(params, batch, rng) + 1e-3 * sum(squares[1:], start=squares[0])

    return replace(base, loss_fn=loss_fn)


# Normalized rows in front of products: computed again in another program they once had other bits


def normalized(x: jax.Array) -> jax.Array:
    """Rows of length one."""
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def standardised(p: Tree, x: jax.Array) -> jax.Array:
    """A layer norm that divides, as libraries do that are not after speed."""
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    scale, bias = (jnp.expand_dims(p[name], tuple(range(x.ndim - 1))) for name in ("scale", "bias"))
    return (x - mean) / jnp.sqrt(var + 1e-6) * scale + bias


def _norm_params(draw: Callable[..., np.ndarray], *shape: int) -> Tree:
    return {"scale": 1 + draw(*shape), "bias": draw(*shape)}


def contrastive() -> Case:
    """Two towers whose normalized outputs are compared with each other: each pair against all
    others of the batch.
    """
    draw = draws(11)
    params = {name: [draw(D, 2 * D), draw(2 * D, D)] for name in "xy"}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x, y = (normalized(jax.nn.gelu(batch[n] @ params[n][0]) @ params[n][1]) for n in "xy")
        similarity = 5 * (x @ y.T)
        return jnp.mean(jax.nn.logsumexp(similarity, -1) - jnp.diagonal(similarity))

    return Case(loss_fn, params, regression_batch(B, D))


def mixer(blocks: int = 1) -> Case:
    """MLP-mixer: products along the tokens of what is normalized along the channels, and the other
    way round.
    """
    draw = draws(12)
    params = [
        {
            "token_norm": _norm_params(draw, D),
            "tokens": [draw(T, 2 * T), draw(2 * T, T)],
            "channel_norm": _norm_params(draw, D),
            "channels": [draw(D, 2 * D), draw(2 * D, D)],
        }
        for _ in range(blocks)
    ]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            y = jnp.swapaxes(standardised(p["token_norm"], x), 1, 2)
            x = x + jnp.swapaxes(jax.nn.gelu(y @ p["tokens"][0]) @ p["tokens"][1], 1, 2)
            y = standardised(p["channel_norm"], x)
            x = x + jax.nn.gelu(y @ p["channels"][0]) @ p["channels"][1]
        return mean_square(x, batch["y"])

    return Case(loss_fn, params, regression_batch(B, T, D))


def stacked_decoder(blocks: int = 2) -> Case:
    """Causal blocks stacked for a scan over them, with a remat inside, tied."""
    draw = draws(13)

    def stack(a: int, b: int) -> np.ndarray:
        return np.stack([draw(a, b) for _ in range(blocks)])

    stacked = {
        "norm": _norm_params(draw, blocks, D),
        "qkv": stack(D, 3 * D),
        "o": stack(D, D),
        "mlp_norm": _norm_params(draw, blocks, D),
        "up": stack(D, 2 * D),
        "down": stack(2 * D, D),
    }

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        causal = jnp.tril(jnp.ones((T, T), bool))[None]

        @jax.checkpoint
        def block(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
            q, k, v = jnp.split(standardised(p["norm"], x) @ p["qkv"], 3, -1)
            scores = jnp.where(causal, jnp.einsum("btd,bsd->bts", q, k) * D**-0.5, -1e9)
            x = x + (jax.nn.softmax(scores) @ v) @ p["o"]
            return x + jax.nn.gelu(standardised(p["mlp_norm"], x) @ p["up"]) @ p["down"], None

        x, _ = jax.lax.scan(block, params["embedding"][batch["tokens"]], params["blocks"])
        logits = (x @ params["embedding"].T).astype(jnp.float32)
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
        )

    return Case(loss_fn, {"embedding": draw(V, D), "blocks": stacked}, token_batch())


def normalized_products(depth: int = 2) -> Case:
    """Products with a derivative of the user's, each of what is normalized."""
    draw = draws(14)
    params = [{"w": draw(D, D), "norm": _norm_params(draw, D)} for _ in range(depth)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = x + jnp.tanh(scaled(standardised(p["norm"], x), p["w"]))
        return mean_square(x, batch["y"])

    return Case(loss_fn, params, regression_batch(B, D))


def noisy(depth: int = 2) -> Case:
    """Gaussian noise of random bits."""
    base = mlp(depth)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for p, key in zip(params, keys_by("fold_in", rng, depth), strict=True):
            x = jnp.tanh(x @ p["w"] + p["b"][None])
            x = x * (1 + 0.3 * jax.random.normal(key, x.shape, x.dtype))
        return mean_square(x, batch["y"])

    return replace(base, loss_fn=loss_fn, rng=quick_key(7))


# Flax


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(2 * D)(nn.LayerNorm()(x))
        return x + nn.Dropout(0.2, deterministic=False)(nn.Dense(D)(nn.gelu(y)))


class LinenModel(nn.Module):
    blocks: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(D)(x))
        for _ in range(self.blocks):
            x = LinenBlock()(x)
        return nn.Dense(D)(x)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def linen(blocks: int = 2) -> Case:
    model = LinenModel(blocks)
    batch = regression_batch(B, D)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"])

    def loss_fn(params: Tree, state: Tree, batch: Tree, rng: Any) -> tuple[jax.Array, Tree]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out, new = model.apply(
                {"params": params, "batch_stats": state},
                batch["x"],
                rngs={"dropout": rng},
                mutable=["batch_stats"],
            )
            return mean_square(out, batch["y"]), new["batch_stats"]

    state = variables["batch_stats"]
    return Case(loss_fn, variables["params"], batch, quick_key(3), state, has_state=True)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.silu(self.up(self.norm(x)))))


class NnxModel(nnx.Module):
    def __init__(self, blocks: int, rngs: nnx.Rngs) -> None:
        self.inputs = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(blocks)])
        self.output = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.inputs(x))
        for block in self.blocks:
            x = block(x)
        return self.output(x)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def flax_nnx(blocks: int = 2) -> Case:
    model = NnxModel(blocks, nnx.Rngs(0))
    graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)

    def loss_fn(params: Tree, state: Tree, batch: Tree, rng: Any) -> tuple[jax.Array, Tree]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            model = nnx.merge(graph, params, state, rest, copy=True)
            nnx.reseed(model, default=rng)
            out = model(batch["x"])
            return mean_square(out, batch["y"]), nnx.state(model, nnx.BatchStat)

    return Case(loss_fn, params, regression_batch(B, D), quick_key(3), stats, has_state=True)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "pre-norm": partial(transformer, keys=None),
    "post-norm": partial(transformer, 1, pre_norm=False, keys=None),
    "threefry": lambda: dropped("fold_in", jax.random.key(7)),
    "old-keys": lambda: dropped("split", jax.random.PRNGKey(7)),
    "chained-keys": lambda: dropped("chain", quick_key(7), depth=6),
    "scanned": scanned,
    "resnet": resnet,
    "unet": unet,
    "three-readers": three_readers,
    "integers": integers,
    "cond": cond,
    "recurrent": recurrent,
    "loops": loops,
    "experts": experts,
    "one-hot": one_hot,
    "custom-rules": custom_rules,
    "nested": nested,
    "spectral": spectral,
    "with-aux": with_aux,
    "unused": unused,
    "regularised": regularised,
    "linen": linen,
    "nnx": flax_nnx,
    "contrastive": contrastive,
    "mixer": mixer,
    "stacked-decoder": stacked_decoder,
    "normalized-products": normalized_products,
    "noisy": noisy,
}
