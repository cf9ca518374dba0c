"""A scan over several layers' values is split into one per layer, where its body does not mix
them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.programs.scans import SplitScan, split_scan

ONE, TWO, NONE = frozenset({1}), frozenset({2}), frozenset[int]()
A, B = np.arange(3.0, dtype=np.float32), np.arange(4.0, 7.0, dtype=np.float32)


def split(
    step: Callable[..., Any], carry: tuple[Any, ...], operands: list[frozenset[int]]
) -> SplitScan:
    traced = jax.make_jaxpr(lambda *xs: jax.lax.scan(step, xs, jnp.arange(3.0)))(*carry)
    (eqn,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    return split_scan(eqn, operands, [True] * len(eqn.outvars))


def apart(carry: Any, x: Any) -> Any:
    a, b = carry
    return (a * 2 + x, b - x), (a.sum(), b.sum())


def mixed(carry: Any, x: Any) -> Any:
    a, b = carry
    return (a + b * x, b + x), a.sum()


def test_what_does_not_mix_is_run_apart_with_the_same_results() -> None:
    found = split(apart, (A, B), [ONE, TWO, NONE])
    assert found.layers == (ONE, TWO, ONE, TWO)
    assert found.separates
    (a, b), (sums_a, sums_b) = jax.lax.scan(apart, (A, B), jnp.arange(3.0))
    for got, expected in zip(found([A, B, jnp.arange(3.0)]), (a, b, sums_a, sums_b), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_what_flows_through_the_carry_is_mixed_in_a_later_round() -> None:
    """A result that is read off before the sum mixes nothing in the first round."""
    found = split(mixed, (A, B), [ONE, TWO, NONE])
    assert found.layers == (ONE | TWO, TWO, ONE | TWO)
    assert not found.separates


def test_what_nobody_reads_is_not_computed() -> None:
    traced = jax.make_jaxpr(lambda *xs: jax.lax.scan(apart, xs, jnp.arange(3.0)))(A, B)
    (eqn,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    found = split_scan(eqn, [ONE, TWO, NONE], [True, False, False, False])
    first, *others = found([A, B, jnp.arange(3.0)])
    np.testing.assert_array_equal(first, 8 * A + 4 * 0 + 2 * 1 + 2)
    assert others == [None, None, None]
