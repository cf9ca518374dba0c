"""Derivative rules under replicas: what sends back to each example what is its own runs, and the
rest is refused.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.ir.examples import Over
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.flatten import flatten
from jvpipe.trace.spread import Spreading
from jvpipe.trace.sums_and_means import Lies
from tests.grid import grid

MANY, FEW, D = 6, 2, 4
DRAW = np.random.default_rng(2)
W = DRAW.normal(size=(D, D)).astype(np.float32)
X = DRAW.normal(size=(MANY, D)).astype(np.float32)
Y = DRAW.integers(0, D, MANY).astype(np.int32)
Rule = Callable[[Any, Any], Any]


def examined(loss: Callable[..., jax.Array]) -> Lies:
    """How a loss of parameters, rows and labels lies, its derivative rules looked into."""

    def of(size: int) -> Any:
        shapes = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in (X, Y)]
        return flatten(loss, jax.ShapeDtypeStruct(W.shape, W.dtype), *shapes, keep_rules=True)

    closed, small = of(MANY), of(FEW)
    spreading = Spreading(MANY, FEW, (), lambda eqn: "layer 0")
    spreading.lies_of = dict.fromkeys(closed.jaxpr.invars[1:], Lies(Over.ALONG, 0))
    spreading.run(closed.jaxpr.eqns, small.jaxpr.eqns)
    return spreading.lies(closed.jaxpr.outvars[0], small.jaxpr.outvars[0])


def rule(backward: Rule, forward: Callable[[Any], Any] = lambda x: None) -> Callable[[Any], Any]:
    """The identity with another backward, of what its forward has left and of the cotangent."""
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, forward(x)), lambda left, g: (backward(left, g),))
    return fn


def on_rows(fn: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A loss with a function in the midst of its rows."""
    return lambda w, x, y: jnp.mean(jnp.tanh(fn(jnp.tanh(x @ w))) ** 2)


def on_weights(fn: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A loss with a function around its parameters."""
    return lambda w, x, y: jnp.mean(jnp.tanh(x @ fn(w)) ** 2)


def on_value(fn: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A loss with a function around it."""
    return lambda w, x, y: fn(jnp.mean(jnp.tanh(x @ w) ** 2))


def in_scan(fn: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A loss with a function in a loop."""

    def loss(w: Any, x: Any, y: Any) -> jax.Array:
        step = lambda h, _: (jnp.tanh(fn(h @ w)), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, jnp.arange(3.0))[0] ** 2)

    return loss


def fused(order: int) -> Callable[..., jax.Array]:
    """A cross-entropy of features and a head, whose rule divides by the number of rows early, late
    or last of all.
    """

    def value(h: Any, w: Any, y: Any) -> jax.Array:
        logits = jax.nn.log_softmax(h @ w)
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], -1))

    def backward(left: Any, g: jax.Array) -> Any:
        h, w, y = left
        wrong = jax.nn.softmax(h @ w) - jax.nn.one_hot(y, D, dtype=h.dtype)
        n = h.shape[0]
        if order == 0:
            wrong = wrong * (g / n)
            return wrong @ w.T, h.T @ wrong, None
        if order == 1:
            wrong = wrong * g / n
            return wrong @ w.T, h.T @ wrong, None
        return (g * wrong) @ w.T / n, (h.T @ (g * wrong)) / n, None

    fn = jax.custom_vjp(value)
    fn.defvjp(lambda h, w, y: (value(h, w, y), (h, w, y)), backward)
    return lambda w, x, y: fn(jnp.tanh(x @ w), w, y)


def attention(w: Any, x: Any, y: Any) -> jax.Array:
    """Rows of tokens that look at one another, by a rule that computes the weights again."""

    def value(q: Any, k: Any) -> jax.Array:
        return jnp.einsum("bts,bs->bt", jax.nn.softmax(q[:, :, None] * k[:, None]), k)

    def backward(left: Any, g: jax.Array) -> Any:
        return jax.vjp(value, *left)[1](g)

    fn = jax.custom_vjp(value)
    fn.defvjp(lambda q, k: (value(q, k), (q, k)), backward)
    return jnp.mean(fn(x @ w, jnp.tanh(x @ w)) ** 2)


@jax.custom_jvp
def safe_norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x**2, -1))


@safe_norm.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    norm = safe_norm(x)
    return norm, jnp.sum(x * t, -1) / jnp.maximum(norm, 1e-6)


def labels(loss: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda w, x, y: jnp.mean(loss(jnp.tanh(x @ w), y))


MASK = lambda g: jnp.where(jnp.abs(g) < 1, g, jnp.zeros_like(g))  # noqa: E731
ROWS: dict[str, Rule] = {
    "straight through": lambda _, g: g,
    "reversed": lambda _, g: -0.5 * g,
    "of each clipped": lambda _, g: (
        g / jnp.maximum(1.0, jnp.linalg.norm(g, axis=-1, keepdims=True))
    ),
    "elements clipped": lambda _, g: jnp.clip(g, -0.1, 0.1),
    "elements masked": lambda _, g: MASK(g),
    "none": lambda _, g: jnp.zeros_like(g),
    "the mean of each taken off": lambda _, g: g - g.mean(-1, keepdims=True),
}
COUPLED: dict[str, Rule] = {
    "centered": lambda _, g: g - g.mean(0)[None],
    "normed": lambda _, g: g / jnp.linalg.norm(g),
    "by the greatest": lambda _, g: g / jnp.max(jnp.abs(g)),
    "divided by the rows": lambda _, g: g / g.shape[0],
    "times the rows": lambda _, g: g * g.shape[0],
    "turned": lambda _, g: g[::-1],
    "a position": lambda _, g: g * jnp.arange(g.shape[0], dtype=g.dtype)[:, None],
    "a running sum": lambda _, g: jnp.cumsum(g, 0),
    "noise": lambda _, g: g + jax.random.normal(jax.random.key(0), g.shape),
    "an array of rows": lambda _, g: g * np.arange(g.shape[0], dtype=np.float32)[:, None],
}
FINE: dict[str, Callable[..., jax.Array]] = {
    **{f"rows: {name}": on_rows(rule(backward)) for name, backward in ROWS.items()},
    **{f"in a scan: {name}": in_scan(rule(backward)) for name, backward in ROWS.items()},
    "a mask of what went forward": on_rows(
        rule(lambda x, g: jnp.where(x > 0, g, 0.0), lambda x: x)
    ),
    "weights: straight through": on_weights(rule(lambda _, g: g)),
    "weights: masked by themselves": on_weights(
        rule(lambda w, g: jnp.where(w > 0, g, 0.0), lambda w: w)
    ),
    "weights: through a product": on_weights(rule(lambda _, g: g @ jnp.ones((D, D)))),
    "weights: nothing": on_weights(rule(lambda _, g: jnp.zeros_like(g))),
    "value: scaled": on_value(rule(lambda _, g: 3.0 * g)),
    "relu": on_rows(jax.nn.relu),
    "relu in a scan": in_scan(jax.nn.relu),
    "silu and gelu": on_rows(lambda x: jax.nn.silu(jax.nn.gelu(x))),
    "log-sum": on_rows(lambda x: jax.nn.logsumexp(x, -1)),
    "soft-max": on_rows(lambda x: jax.nn.softmax(x, -1)),
    "relu of six": on_rows(jax.nn.relu6),
    "norm": on_rows(safe_norm),
    "norm of rows, mapped": on_rows(jax.vmap(safe_norm)),
    "optax, whole labels": labels(optax.softmax_cross_entropy_with_integer_labels),
    "optax, sigmoid": labels(lambda x, y: optax.sigmoid_binary_cross_entropy(x, x > 0)),
    "optax, Huber": labels(lambda x, y: optax.huber_loss(x)),
    "optax, norm": labels(lambda x, y: optax.safe_norm(x, 1e-3, axis=-1)),
    "attention": attention,
    **{f"fused, {order}": fused(order) for order in range(3)},
}
REFUSED: dict[str, Callable[..., jax.Array]] = {
    **{f"rows: {name}": on_rows(rule(backward)) for name, backward in COUPLED.items()},
    **{f"in a scan: {name}": in_scan(rule(backward)) for name, backward in COUPLED.items()},
    "a mean of what went forward": on_rows(rule(lambda m, g: g * m[None], lambda x: x.mean(0))),
    "weights: clipped": on_weights(rule(lambda _, g: jnp.clip(g, -0.1, 0.1))),
    "weights: normed": on_weights(rule(lambda _, g: g / jnp.linalg.norm(g))),
    "weights: shifted": on_weights(rule(lambda w, g: g + 0.1 * w, lambda w: w)),
    "weights: its sign": on_weights(rule(lambda _, g: jnp.sign(g))),
    "value: clipped": on_value(rule(lambda _, g: jnp.minimum(g, 0.3))),
    "value: shifted": on_value(rule(lambda _, g: g + 1.0)),
    "value: its square": on_value(rule(lambda _, g: g * g)),
}


@pytest.mark.parametrize("name", grid(FINE, *list(FINE)[::3]))
def test_a_rule_that_keeps_examples_apart_is_made_of_slices(name: str) -> None:
    loss = FINE[name]
    assert examined(loss).over is Over.MEAN
    grad = jax.jit(jax.grad(lambda w, x, y, share: share * loss(w, x, y)))
    shares = [(a, b, (b - a) / MANY) for a, b in ((0, 2), (2, 6))]
    parts = sum(grad(W, X[a:b], Y[a:b], share) for a, b, share in shares)
    np.testing.assert_allclose(grad(W, X, Y, 1.0), parts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_couples_examples_is_refused_by_name(name: str) -> None:
    with pytest.raises(CoupledError, match=r"layer 0 cannot be replicated: .* rule"):
        examined(REFUSED[name])
