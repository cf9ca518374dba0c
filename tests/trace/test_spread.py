"""How the outputs of a loss lie over its examples: sums, means and what is neither; coupling is
refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.examples import Over
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.flatten import flatten
from jvpipe.trace.spread import Spreading, reaching
from jvpipe.trace.sums_and_means import Beside, Lies
from tests.grid import grid

MANY, FEW, T, D = 6, 2, 3, 4


def spread(
    fn: Callable[..., Any], remembers: Callable[[list[Any]], list[Any]] = lambda outs: []
) -> list[Lies]:
    """How the results of a function of [examples, tokens, features] lie; some of them are
    remembered as model state.
    """
    shapes = [jax.ShapeDtypeStruct((n, T, D), np.float32) for n in (MANY, FEW)]
    closed, small = (flatten(fn, shape, keep_rules=True) for shape in shapes)
    remembered = reaching(closed.jaxpr.eqns, remembers(closed.jaxpr.outvars))
    spreading = Spreading(MANY, FEW, remembered, lambda eqn: "layer 0")
    spreading.lies_of = {closed.jaxpr.invars[0]: Lies(Over.ALONG, 0)}
    spreading.run(closed.jaxpr.eqns, small.jaxpr.eqns)
    return [
        spreading.lies(a, b) for a, b in zip(closed.jaxpr.outvars, small.jaxpr.outvars, strict=True)
    ]


def noisy(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
    return h + jax.random.normal(key, h.shape), None


def count(x: jax.Array) -> jax.Array:
    return jnp.sum(x > 0).astype(jnp.float32)


def rounded(x: jax.Array) -> jax.Array:
    """A count in a type that rounds counts above 256."""
    return count(x).astype(jnp.bfloat16)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


FOUND: dict[str, tuple[Callable[[jax.Array], Any], Over]] = {
    "each": (lambda x: jnp.tanh(x), Over.ALONG),
    "none": (lambda x: jnp.arange(3.0), Over.NONE),
    "a mean of complex values": (
        lambda x: jnp.mean(jnp.abs(x.astype(complex) * np.complex64(2j))),
        Over.MEAN,
    ),
    "sum": (lambda x: jnp.sum(x**2), Over.SUM),
    "mean": (lambda x: jnp.mean(x**2), Over.MEAN),
    "mean by hand": (lambda x: jnp.sum(x) / x.shape[0], Over.MEAN),
    "mean over examples alone": (lambda x: jnp.mean(x, 0), Over.MEAN),
    "mean of means": (lambda x: jnp.mean(jnp.mean(x, (1, 2))), Over.MEAN),
    "mean and what depends on none": (
        lambda x: jnp.mean(x) + 0.1 * jnp.sum(jnp.arange(3.0)),
        Over.MEAN,
    ),
    "means together": (lambda x: 2 * jnp.mean(x) - jnp.mean(x**2) / 3, Over.MEAN),
    "sums together": (lambda x: jnp.sum(x) + 2 * jnp.sum(x**2), Over.SUM),
    "sum over a constant": (lambda x: jnp.sum(x) / 8, Over.SUM),
    "mean times the count": (lambda x: jnp.mean(x) * x.shape[0], Over.SUM),
    "a mean as a whole number": (lambda x: jnp.mean(x).astype(int), Over.MIXED),
    "a sum as a whole number": (lambda x: jnp.sum(x).astype(int), Over.MIXED),
    "a count as a whole number": (lambda x: count(x).astype(int), Over.SUM),
    "a count of 8 bits": (lambda x: jnp.sum(x > 0, dtype=jnp.uint8), Over.SUM),
    "a sum without a sign, which may wrap below zero, made wide": (
        lambda x: jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32).astype(jnp.float32),
        Over.MIXED,
    ),
    "a count of 8 bits, which may wrap, made wide": (
        lambda x: jnp.sum(x > 0, dtype=jnp.uint8).astype(jnp.float32),
        Over.MIXED,
    ),
    "half of a count": (lambda x: jnp.sum(x > 0) // 2, Over.MIXED),
    "whether there is any": (lambda x: jnp.sum(x > 0).astype(bool), Over.MIXED),
    "sum over items, times items": (
        lambda x: jnp.sum(x) / jnp.sum(x > 0, dtype=jnp.float32) * count(x),
        Over.SUM,
    ),
    "over items or one": (lambda x: 2 * jnp.sum(x) / jnp.maximum(count(x), 1) * count(x), Over.SUM),
    "over weights or one": (
        lambda x: 2 * jnp.sum(x) / jnp.maximum(jnp.sum(x * x), 1.0) * jnp.sum(x * x),
        Over.MIXED,
    ),
    "over rounded items": (
        lambda x: jnp.sum(x) / wide(rounded(x)) * count(x),
        Over.MIXED,
    ),
    "over rounded items, times them": (
        lambda x: jnp.sum(x) / wide(rounded(x)) * wide(rounded(x)),
        Over.SUM,
    ),
    "over rounded items or one": (
        lambda x: jnp.sum(x) / wide(jnp.maximum(rounded(x), 1)) * wide(rounded(x)),
        Over.SUM,
    ),
    "over more than one": (lambda x: jnp.sum(x) / jnp.maximum(count(x), 2) * count(x), Over.MIXED),
    "over other items": (
        lambda x: jnp.sum(x) / jnp.sum(x > 1, dtype=jnp.float32) * count(x),
        Over.MIXED,
    ),
    "two over items": (
        lambda x: (jnp.sum(x) / count(x) - jnp.sum(x**2) / count(x) + 0.5) * count(x),
        Over.SUM,
    ),
    "count": (lambda x: jnp.float32(x.shape[0]) * jnp.ones(()), Over.SUM),
    "greatest": (lambda x: jnp.max(x), Over.MIXED),
    "square of a mean": (lambda x: jnp.mean(x) ** 2, Over.MIXED),
    "mean over items": (lambda x: jnp.sum(x) / jnp.sum(x > 0, dtype=jnp.float32), Over.MIXED),
    "product over examples": (lambda x: jnp.einsum("btd,bte->de", x, x), Over.SUM),
    "positions": (
        lambda x: x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None],
        Over.ALONG,
    ),
    "zeros for each": (lambda x: jnp.zeros((x.shape[0], 5)) + x[:, 0, :1], Over.ALONG),
    "scan over tokens": (
        lambda x: jax.lax.scan(
            lambda h, y: (h + y, h * y), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
        )[0],
        Over.ALONG,
    ),
    "what a scan stacks": (
        lambda x: jax.lax.scan(
            lambda h, y: (h + y, h * y), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
        )[1],
        Over.ALONG,
    ),
    "a loop as often for all": (
        lambda x: jax.lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1])), (0, x)
        )[1],
        Over.ALONG,
    ),
    "looked up, or NaN": (
        lambda x: jnp.take_along_axis(x, jnp.argmax(x, -1)[..., None], -1, mode="fill"),
        Over.ALONG,
    ),
    "a branch for all": (
        lambda x: jax.lax.cond(jnp.arange(3)[1] > 0, jnp.sin, jnp.cos, x),
        Over.ALONG,
    ),
    "noise in a loop": (
        lambda x: jax.lax.scan(noisy, x, jax.random.split(jax.random.key(0), 3))[0],
        Over.ALONG,
    ),
    "a rule of its own": (lambda x: jax.nn.relu(x), Over.ALONG),
    "a log-sum": (lambda x: jnp.mean(jax.nn.logsumexp(x, -1)), Over.MEAN),
}


@jax.custom_jvp
def noise(x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.key(0), x.shape)


noise.defjvp(lambda primals, tangents: (noise(*primals), tangents[0]))
REFUSED: dict[str, tuple[Callable[[jax.Array], Any], str]] = {
    "centered": (
        lambda x: x - jnp.mean(x, 0)[None],
        "layer 0 cannot be replicated: .* gives single examples",
    ),
    "greatest": (lambda x: x / jnp.max(x), "gives single examples"),
    "each with each": (lambda x: jnp.einsum("btd,ctd->bc", x, x), "makes .6, 6. of 6 examples"),
    "a scan over examples": (
        lambda x: jax.lax.scan(lambda h, y: (h + y, h), x[:1, 0].sum(0), x[:, 0])[1],
        "examples",
    ),
    "noise in a rule": (noise, "inside a derivative rule"),
    "a loop for each": (
        lambda x: jax.lax.fori_loop(0, x.shape[0], lambda i, y: jnp.sin(y), x),
        "depends on the number of|as its",
    ),
    "a loop until all are small": (
        lambda x: jax.lax.while_loop(lambda y: jnp.max(y) > 1.0, lambda y: y / 2, x),
        "branches on its examples",
    ),
    "a power": (lambda x: x ** x.shape[0], "depends on the number of examples"),
    "a branch by the examples": (
        lambda x: jax.lax.cond(jnp.max(x) > 0, jnp.sin, jnp.cos, x),
        "branches on its examples",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_finds_sums_and_means(name: str) -> None:
    fn, over = FOUND[name]
    (found,) = spread(fn)
    assert found.over is over


SUMMED = [name for name, (_, over) in FOUND.items() if over in (Over.SUM, Over.MEAN)]


@pytest.mark.parametrize("name", grid(SUMMED, *SUMMED[::3]))
def test_what_is_a_sum_or_a_mean_is_made_of_those_of_slices(name: str) -> None:
    fn, over = FOUND[name]
    x = np.random.default_rng(1).normal(size=(MANY, T, D)).astype(np.float32)
    parts = [(1, 3), (3, 6), (0, 1)]
    shares = [1.0 if over is Over.SUM else (b - a) / MANY for a, b in parts]
    total = sum(
        share * np.asarray(fn(jnp.asarray(x[a:b])))
        for share, (a, b) in zip(shares, parts, strict=True)
    )
    np.testing.assert_allclose(np.asarray(fn(jnp.asarray(x))), total, rtol=1e-4, atol=1e-5)


def test_what_stands_beside_a_sum_counts_by_the_share_of_a_slice() -> None:
    for fn, beside in (
        (lambda x: jnp.sum(x) + jnp.mean(x**2), Beside.RIGHT),
        (lambda x: 1.0 - jnp.sum(x), Beside.LEFT),
        (lambda x: jnp.sum(x > 0) + 1, Beside.FIRST_RIGHT),
        (lambda x: jnp.sum(x) / jnp.sum(x > 0, dtype=jnp.float32) * count(x), Beside.DIVISOR),
    ):
        closed, small = (
            flatten(fn, jax.ShapeDtypeStruct((n, T, D), np.float32)) for n in (MANY, FEW)
        )
        spreading = Spreading(MANY, FEW, set(), lambda eqn: "layer 0")
        spreading.lies_of = {closed.jaxpr.invars[0]: Lies(Over.ALONG, 0)}
        spreading.run(closed.jaxpr.eqns, small.jaxpr.eqns)
        assert spreading.lies(closed.jaxpr.outvars[0], small.jaxpr.outvars[0]).over is Over.SUM
        assert list(spreading.amended.values()) == [beside]


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_couples_examples(name: str) -> None:
    fn, why = REFUSED[name]
    with pytest.raises(CoupledError, match=why):
        spread(fn)


def test_batch_norm_is_known_by_its_model_state() -> None:
    def normed(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean, square = jnp.mean(x, (0, 1)), jnp.mean(x**2, (0, 1))
        variance = square - mean**2
        scale = jax.lax.rsqrt(variance + 1e-5)
        return (x - mean[None, None]) * scale[None, None], 0.9 + 0.1 * mean, 0.9 + 0.1 * variance

    with pytest.raises(CoupledError, match="batch norm"):
        spread(normed)
    with pytest.raises(CoupledError):
        spread(normed, lambda outs: outs[1:2])  # the variance is not remembered
    out, mean, variance = spread(normed, lambda outs: outs[1:])
    assert (out.over, out.axis) == (Over.ALONG, 0)
    assert (mean.over, variance.over) == (Over.MEAN, Over.MIXED)


def test_a_batch_norm_divides_what_it_has_centered() -> None:
    """A center alone, or a function of one, would be another loss on each replica's examples."""

    def centered(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = jnp.mean(x, (0, 1))
        return x - mean[None, None], mean

    def two_passes(x: jax.Array) -> tuple[jax.Array, ...]:
        less, mean = centered(x)
        variance = jnp.mean(less**2, (0, 1))
        return less / jnp.sqrt(variance + 1e-5)[None, None], mean, variance

    def bent(by: Callable[[jax.Array], jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
        less, mean = centered(x)
        out, *statistics = two_passes(by(less))
        return out, mean, *statistics

    out, mean, variance = spread(two_passes, lambda outs: outs[1:])
    assert not out.open
    assert not mean.open
    assert variance.open
    assert spread(centered, lambda outs: outs[1:])[0].open
    for name, by in (("tanh", jnp.tanh), ("div", lambda less: 1 / less)):
        with pytest.raises(
            CoupledError, match=f"'{name}' reads examples from which a statistic of several"
        ):
            spread(partial(bent, by), lambda outs: outs[1:])


def test_a_batch_norm_divides_by_the_standard_deviation_once() -> None:
    """A product with it, or with another power of it, is no batch norm."""

    def scaled(
        by: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array
    ) -> tuple[jax.Array, ...]:
        mean = jnp.mean(x, (0, 1))
        less = x - mean[None, None]
        variance = jnp.mean(less**2, (0, 1))
        return by(less, variance[None, None] + 1e-5), mean, variance

    sqrt, rsqrt = jnp.sqrt, jax.lax.rsqrt
    for by in (
        lambda x, v: x / sqrt(v),
        lambda x, v: x * rsqrt(v),
        lambda x, v: x * (2 / sqrt(v)),
        lambda x, v: x * sqrt(v) ** -1,
        lambda x, v: x / (1 / rsqrt(v)),
    ):
        assert not spread(partial(scaled, by), lambda outs: outs[1:])[0].open
    for by in (
        lambda x, v: x * sqrt(v),
        lambda x, v: x / rsqrt(v),
        lambda x, v: x / (sqrt(v) * sqrt(v)),
        lambda x, v: x * sqrt(v) ** -2,
    ):
        with pytest.raises(CoupledError, match="reads examples from which a statistic of several"):
            spread(partial(scaled, by), lambda outs: outs[1:])


def test_a_loss_that_is_another_program_at_another_size_is_refused() -> None:
    with pytest.raises(CoupledError, match="other operations on 2 examples than on 6"):
        spread(lambda x: jnp.sin(x) if x.shape[0] > 2 else jnp.cos(x))
