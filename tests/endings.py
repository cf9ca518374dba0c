"""Endings of losses: what users make of the values of single examples, in every form that a loss
has.

An ending is a way to make one number of what each example has, in a form: plain, `Weighted`, beside
a model state, beside aux. The oracle is plain JAX on whole micro-batches, one after another, and
knows nothing of slices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import Weighted

Tree = Any
MICRO, EXAMPLES, D, V = 2, 6, 4, 5
DRAW = np.random.default_rng(11)
PARAMS = [(0.7 * DRAW.normal(size=s)).astype(np.float32) for s in ((D, D), (D, D), (D, V))]
BATCH = {
    "x": DRAW.normal(size=(MICRO * EXAMPLES, D)).astype(np.float32),
    "y": DRAW.integers(0, V, MICRO * EXAMPLES).astype(np.int32),
    "w": DRAW.choice(np.array([0, 0.125, 0.25], np.float32), MICRO * EXAMPLES),
    "m": np.tile(np.array([True, False, False, True, True, False]), MICRO),
    "c": np.tile(np.array([2, 0, 0, 1, 1, 0], np.int32), MICRO),
}
RATE = 0.5


@dataclass(frozen=True)
class Seen:
    """What an ending is made of, of one micro-batch: `each` has a value for each example.

    The `rows` are what the model makes of them before, the `sums` are what its layers have left,
    one value a layer.
    """

    params: Tree
    batch: Tree
    rows: jax.Array
    each: jax.Array
    sums: list[jax.Array]
    rng: jax.Array

    @property
    def mask(self) -> jax.Array:
        """One for the examples that count."""
        return self.batch["m"].astype(jnp.float32)

    @property
    def weight(self) -> jax.Array:
        """Of each example; they add up to less than one now and then."""
        return self.batch["w"]

    @property
    def size(self) -> int:
        """How many examples there are."""
        return self.each.shape[0]

    @property
    def decay(self) -> Any:
        """Of no example."""
        return 0.01 * sum(jnp.sum(w**2) for w in self.params)


Value = Callable[[Seen], Any]


@dataclass(frozen=True)
class Ending:
    """A loss, the options that it needs, and the model state that it begins with."""

    loss: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    state: Tree = None
    tolerance: float = 1e-3


def seen(params: Tree, batch: Tree, rng: jax.Array) -> Seen:
    """What a small model makes of a micro-batch."""
    x, sums = batch["x"], []
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
        sums.append(jnp.mean(x**2))
    logits = jax.nn.log_softmax(x @ params[-1])
    each = -jnp.take_along_axis(logits, batch["y"][:, None], -1)[:, 0]
    return Seen(params, batch, x, each, sums, rng)


def ratio(total: jax.Array, count: jax.Array) -> jax.Array:
    """A mean over what counts, guarded against none."""
    return total / jnp.maximum(count, 1.0)


def backward(fn: Callable[[Any], Any]) -> Callable[[jax.Array], jax.Array]:
    """The identity with a backward of its own."""
    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (x, None), lambda _, g: (fn(g),))
    return made


def dropped(s: Seen) -> jax.Array:
    """Dropout."""
    return jnp.where(jax.random.bernoulli(s.rng, 0.5, s.rows.shape), s.rows, 0.0)


def dropped_in_scan(s: Seen) -> jax.Array:
    """Dropout in each step of a loop."""

    def step(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        kept = jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.where(kept, jnp.tanh(h @ s.params[0]), 0.0), None

    return jax.lax.scan(step, s.rows, jax.random.split(s.rng, 3))[0]


def of_classes(s: Seen) -> jax.Array:
    """What examples have, added up by their labels."""
    return jax.ops.segment_sum(s.each, s.batch["y"], V)


def smoothed(s: Seen) -> jax.Array:
    """Cross-entropies with labels that are smoothed, of which JAX takes the sums over classes."""
    logits = jax.nn.log_softmax(s.rows @ s.params[-1])
    hot = jax.nn.one_hot(s.batch["y"], V, dtype=logits.dtype) * 0.9 + 0.1 / V
    return -jnp.sum(hot * logits, -1)


PLAIN: dict[str, Value] = {
    "mean": lambda s: jnp.mean(s.each),
    "sum": lambda s: jnp.sum(s.each),
    "sum by the size": lambda s: jnp.sum(s.each) / s.size,
    "each by the size": lambda s: (s.each / s.size).sum(),
    "each times one by the size": lambda s: (s.each * (1 / s.size)).sum(),
    "sum by a constant": lambda s: jnp.sum(s.each) / 8,
    "mean of rows": lambda s: jnp.mean(s.rows**2),
    "mean of means": lambda s: jnp.mean(jnp.mean(s.rows**2, -1)),
    "mean over one axis, then the other": lambda s: jnp.mean(jnp.mean(s.rows**2, 0)),
    "half of a sum of squares": lambda s: 0.5 * jnp.sum(s.rows**2),
    "mean and decay": lambda s: jnp.mean(s.each) + s.decay,
    "decay and mean": lambda s: s.decay + jnp.mean(s.each),
    "sum and decay": lambda s: jnp.sum(s.each) + s.decay,
    "sum and mean": lambda s: jnp.sum(s.each) + jnp.mean(s.rows**2),
    "mean less mean": lambda s: jnp.mean(s.each) - 0.1 * jnp.mean(s.rows),
    "list of means": lambda s: sum([jnp.mean(s.each), *s.sums]),
    "stack of means": lambda s: jnp.stack([jnp.mean(s.each), *s.sums]).sum(),
    "mean of a stack": lambda s: jnp.mean(jnp.stack([jnp.mean(s.each), *s.sums])),
    "array of means": lambda s: jnp.mean(jnp.array([jnp.mean(s.each), *s.sums])),
    "stack of rows": lambda s: jnp.mean(jnp.stack([s.rows, jnp.tanh(s.rows)]) ** 2),
    "stack of rows behind": lambda s: jnp.mean(jnp.stack([s.rows, jnp.tanh(s.rows)], -1) ** 2),
    "stack of each": lambda s: jnp.stack([s.each, s.each**2]).mean(1).sum(),
    "weighted by batch": lambda s: jnp.mean(s.each * s.weight),
    "weighted sum": lambda s: jnp.sum(s.each * s.weight),
    "product with weights": lambda s: s.each @ s.weight,
    "weighted by a parameter": lambda s: jnp.mean(s.each) * jnp.exp(s.params[0][0, 0]),
    "masked": lambda s: jnp.mean(jnp.where(s.batch["m"], s.each, 0.0)),
    "masked by itself": lambda s: jnp.mean(jnp.where(s.each > 1, s.each, 0.0)),
    "clipped for each": lambda s: jnp.mean(jnp.clip(s.each, 0.2, 1.5)),
    "focal": lambda s: jnp.mean((1 - jnp.exp(-s.each)) ** 2 * s.each),
    "smoothed labels": lambda s: jnp.mean(smoothed(s)),
    "rows less a target": lambda s: jnp.mean((s.rows - s.batch["x"]) ** 2),
    "rows normed": lambda s: jnp.mean(
        s.rows / (1e-3 + jnp.linalg.norm(s.rows, axis=-1, keepdims=True)) * s.batch["x"]
    ),
    "mapped": lambda s: jnp.mean(jax.vmap(lambda h: jnp.max(h @ s.params[1]))(s.rows)),
    "dropout": lambda s: jnp.mean(dropped(s) ** 2),
    "dropout in a scan": lambda s: jnp.mean(dropped_in_scan(s) ** 2),
    "scatter to one column": lambda s: jnp.mean(s.rows.at[:, 1].add(1.0) ** 2),
    "scatter of labels": lambda s: jnp.mean(
        s.rows.at[jnp.arange(s.size), s.batch["y"] % D].add(1.0) ** 2
    ),
    "sums of classes": lambda s: jnp.sum(of_classes(s) * jnp.arange(1.0, V + 1)),
    "sums of classes by the size": lambda s: jnp.sum(of_classes(s) / s.size),
    "squares of sums of classes": lambda s: jnp.sum(of_classes(s) ** 2),
    "table of rows": lambda s: jnp.mean(
        s.rows @ s.params[0][:, :1] * s.params[1][s.batch["y"] % D]
    ),
    "gram": lambda s: jnp.sum((s.rows.T @ s.rows) * s.params[0]) / s.size,
    "square of a mean": lambda s: jnp.mean(s.each) ** 2,
    "root of a mean": lambda s: jnp.sqrt(jnp.mean(s.rows**2)),
    "log of a mean": lambda s: jnp.log(jnp.mean(s.each)),
    "greatest": lambda s: jnp.max(s.each),
    "log-sum over examples": lambda s: jax.nn.logsumexp(s.each),
    "soft-max over examples": lambda s: jnp.sum(jax.nn.softmax(s.each) * s.each),
    "centered": lambda s: jnp.mean((s.each - jnp.mean(s.each)[None]) ** 2),
    "variance": lambda s: jnp.var(s.each),
    "contrastive": lambda s: -jnp.mean(jnp.diag(jax.nn.log_softmax(s.rows @ s.batch["x"].T))),
    "sorted": lambda s: jnp.mean(jnp.sort(s.each)[:2]),
    "the first example": lambda s: s.each[0],
    "neighbors": lambda s: jnp.mean((s.each[1:] - s.each[:-1]) ** 2),
    "by position": lambda s: jnp.mean(s.each * jnp.arange(s.size, dtype=jnp.float32)),
    "by an array of positions": lambda s: jnp.mean(s.each * np.arange(s.size, dtype=np.float32)),
    "items that differ": lambda s: ratio(jnp.sum(s.each * s.mask), jnp.sum(s.mask)),
    "count held back": lambda s: (
        jnp.sum(s.each) / jnp.sum(s.each) * jax.lax.stop_gradient(jnp.sum(s.each))
    ),
    "straight through": lambda s: jnp.mean(
        s.each + jax.lax.stop_gradient(jnp.round(s.each) - s.each)
    ),
    "value of another": lambda s: jnp.mean(s.each) + jax.lax.stop_gradient(jnp.max(s.each)),
    "reversed": lambda s: jnp.mean(backward(lambda g: -g)(s.rows) ** 2),
    "clipped backward": lambda s: jnp.mean(
        backward(lambda g: jnp.clip(g, -0.02, 0.02))(s.rows) ** 2
    ),
    "centered backward": lambda s: jnp.mean(backward(lambda g: g - g.mean(0)[None])(s.rows) ** 2),
    "backward by the size": lambda s: jnp.mean(backward(lambda g: g / g.shape[0])(s.rows) ** 2),
    "scaled backward of the loss": lambda s: backward(lambda g: 3 * g)(jnp.mean(s.each)),
    "clipped backward of the loss": lambda s: backward(lambda g: jnp.minimum(g, 0.3))(
        jnp.mean(s.each)
    ),
    "running sum": lambda s: jnp.mean(jnp.cumsum(s.each)),
}
ROUNDED: dict[str, Value] = {
    "mean": lambda s: jnp.mean(s.each.astype(jnp.bfloat16)).astype(jnp.float32),
    "sum": lambda s: jnp.sum(s.each.astype(jnp.bfloat16)).astype(jnp.float32),
}
WEIGHTED: dict[str, Callable[[Seen], tuple[jax.Array, jax.Array]]] = {
    "masked": lambda s: (jnp.sum(s.each * s.mask), jnp.sum(s.mask)),
    "counted": lambda s: (jnp.sum(jnp.where(s.batch["m"], s.each, 0.0)), jnp.sum(s.batch["m"])),
    "float weights": lambda s: (jnp.sum(s.each * s.weight), jnp.sum(s.weight)),
    "product": lambda s: (s.each @ s.weight, jnp.sum(s.weight)),
    "of all": lambda s: (jnp.sum(s.each), jnp.float32(s.size)),
    "mean times the size": lambda s: (jnp.mean(s.each) * s.size, jnp.float32(s.size)),
    "mean times the count": lambda s: (
        ratio(jnp.sum(s.each * s.mask), jnp.sum(s.mask)) * jnp.sum(s.mask),
        jnp.sum(s.mask),
    ),
    "mean times whole weights": lambda s: (
        ratio(jnp.sum(s.each * s.batch["c"].astype(jnp.float32)), _whole(s)) * _whole(s),
        _whole(s),
    ),
    "mean times float weights, guarded": lambda s: (
        ratio(jnp.sum(s.each * s.weight), jnp.sum(s.weight)) * jnp.sum(s.weight),
        jnp.sum(s.weight),
    ),
    "mean times float weights": lambda s: (
        jnp.sum(s.each * s.weight) / jnp.sum(s.weight) * jnp.sum(s.weight),
        jnp.sum(s.weight),
    ),
    "mean and decay, times the count": lambda s: (
        (ratio(jnp.sum(s.each * s.mask), jnp.sum(s.mask)) + s.decay) * jnp.sum(s.mask),
        jnp.sum(s.mask),
    ),
    "sum and decay": lambda s: (jnp.sum(s.each * s.mask) + s.decay, jnp.sum(s.mask)),
    "sum and decay by the count": lambda s: (
        jnp.sum(s.each * s.mask) + s.decay * jnp.sum(s.mask),
        jnp.sum(s.mask),
    ),
    "weight and one": lambda s: (jnp.sum(s.each * s.mask), jnp.sum(s.mask) + 1.0),
    "weight of a constant": lambda s: (jnp.mean(s.each), jnp.float32(1)),
    "mean over means": lambda s: (jnp.mean(s.each), jnp.sum(s.mask)),
    "unmasked sum, by the count": lambda s: (
        jnp.sum(s.each) / jnp.sum(s.mask) * jnp.sum(s.mask),
        jnp.sum(s.mask),
    ),
    "tokens": lambda s: (
        jnp.sum(jnp.where(s.batch["x"] > 0, s.rows**2, 0.0)),
        jnp.sum(s.batch["x"] > 0, dtype=jnp.float32),
    ),
    "guarded twice": lambda s: (
        jnp.sum(s.each * s.mask) / jnp.maximum(jnp.sum(s.mask), 1.0),
        jnp.maximum(jnp.sum(s.mask), 1.0),
    ),
    "sums of classes": lambda s: (jnp.sum(of_classes(s)), jnp.float32(s.size)),
}


def _whole(s: Seen) -> jax.Array:
    return jnp.sum(s.batch["c"]).astype(jnp.float32)


STATES: dict[str, tuple[Callable[[Seen, jax.Array], jax.Array], dict[str, Any]]] = {
    "moving mean": (lambda s, old: 0.9 * old + 0.1 * jnp.mean(s.rows), {}),
    "sum": (lambda s, old: old + jnp.sum(s.each), {}),
    "counter": (lambda s, old: old + s.size, {}),
    "steps": (lambda s, old: old + 1.0, {}),
    "count": (lambda s, old: old + jnp.sum(s.mask), {}),
    "decayed sum": (lambda s, old: 0.5 * old + jnp.sum(s.weight), {}),
    "mean by the size": (lambda s, old: 0.5 * old + (s.each / s.size).sum(), {}),
    "greatest": (lambda s, old: jnp.maximum(old, jnp.max(s.each)), {}),
    "square of a mean": (lambda s, old: old + jnp.mean(s.each) ** 2, {}),
    "greatest, as said": (
        lambda s, old: jnp.maximum(old, jnp.max(s.batch["x"]) * 0 + 2.0),
        {"model_state_reduce": {"s": "same"}},
    ),
}
AUX: dict[str, tuple[Value, dict[str, Any]]] = {
    "each": (lambda s: s.each, {}),
    "rows": (lambda s: s.rows, {}),
    "mean": (lambda s: jnp.mean(s.rows, 0), {}),
    "count": (lambda s: jnp.sum(s.batch["m"]), {}),
    "right": (lambda s: jnp.sum(s.each < 1), {}),
    "sum": (lambda s: jnp.sum(s.each), {}),
    "of none": (lambda s: s.decay, {}),
    "each by the size": (lambda s: s.each / s.size, {}),
    "greatest": (lambda s: jnp.max(s.each), {}),
    "greatest, as said": (lambda s: jnp.max(s.each), {"aux_reduce": {"a": "max"}}),
    "stack of means": (lambda s: jnp.stack(s.sums), {}),
    "sums of classes": (of_classes, {}),
    "ratio": (lambda s: ratio(jnp.sum(s.each * s.mask), jnp.sum(s.mask)), {}),
}


def plain(value: Value, tolerance: float = 1e-3) -> Ending:
    """A loss of one number."""
    loss = lambda params, batch, rng: value(seen(params, batch, rng))  # noqa: E731
    return Ending(loss, tolerance=tolerance)


def weighted(value: Callable[[Seen], tuple[jax.Array, jax.Array]]) -> Ending:
    """A loss with its weight."""
    return Ending(lambda params, batch, rng: Weighted(*value(seen(params, batch, rng))))


def stateful(value: Callable[[Seen, jax.Array], jax.Array], options: dict[str, Any]) -> Ending:
    """A mean that reads a model state, and makes the next."""

    def loss(params: Tree, state: Tree, batch: Tree, rng: jax.Array) -> tuple[jax.Array, Tree]:
        s = seen(params, batch, rng)
        return jnp.mean(s.each) + 0.1 * jnp.mean(s.rows) * state["s"], {"s": value(s, state["s"])}

    return Ending(loss, {"has_state": True, **options}, {"s": np.float32(0.5)})


def with_aux(value: Value, options: dict[str, Any]) -> Ending:
    """A mean, and something beside it."""

    def loss(params: Tree, batch: Tree, rng: jax.Array) -> tuple[jax.Array, Tree]:
        s = seen(params, batch, rng)
        return jnp.mean(s.each), {"a": value(s)}

    return Ending(loss, {"has_aux": True, **options})


ENDINGS: dict[str, Ending] = {
    **{f"plain: {name}": plain(value) for name, value in PLAIN.items()},
    **{f"plain: {name} in bfloat16": plain(value, 3e-2) for name, value in ROUNDED.items()},
    **{f"weighted: {name}": weighted(value) for name, value in WEIGHTED.items()},
    **{f"state: {name}": stateful(*made) for name, made in STATES.items()},
    **{f"aux: {name}": with_aux(*made) for name, made in AUX.items()},
}


def micro_batches() -> Iterator[tuple[int, Tree]]:
    """The micro-batches of a step, by their numbers."""
    for m in range(MICRO):
        yield m, {k: v[m * EXAMPLES : (m + 1) * EXAMPLES] for k, v in BATCH.items()}


def expected(ending: Ending, rng: jax.Array) -> tuple[Any, Tree, Tree, list[Tree]]:
    """What one device makes of a step: the loss, the parameters, the model state, and the aux of
    each micro-batch.
    """
    has_state, has_aux = ("has_state" in ending.options, "has_aux" in ending.options)

    @jax.jit
    def total(params: Tree, state: Tree, batch: Tree, key: jax.Array) -> tuple[jax.Array, Any]:
        out = ending.loss(params, *([state] if has_state else []), batch, key)
        left: Sequence[Any] = ()
        if has_state or has_aux:
            out, *left = out
        is_weighted = isinstance(out, Weighted)
        return (out.total, (out.weight, left)) if is_weighted else (out, (1.0, left))

    state, sums, weight, aux = ending.state, [], 0.0, []
    for m, batch in micro_batches():
        key = jax.random.fold_in(jax.random.fold_in(rng, 0), m)
        found = jax.value_and_grad(total, has_aux=True)(PARAMS, state, batch, key)
        (value, (count, left)), grads = found
        state = left[0] if has_state else None
        aux += left if has_aux else []
        weight += np.asarray(count, np.float64)
        sums.append((value, grads))
    loss, grads = jax.tree.map(lambda *parts: sum(parts) / np.float32(weight), *sums)
    return loss, [w - RATE * g for w, g in zip(PARAMS, grads, strict=True)], state, aux
