"""The numbers that keys are derived with become values that a layer reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe import _jax
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import lift_key_constants

KEYS = {
    "new": jax.random.key(3),
    "old": jax.random.PRNGKey(3),
    "rbg": jax.random.key(3, impl="rbg"),
    "old-rbg": jax.random.key_data(jax.random.key(3, impl="rbg")),
}


def lifted(fn: Any, key: jax.Array) -> list[int]:
    return [int(value) for value in lift_key_constants(flatten(fn, key).jaxpr.eqns)[1].values()]


@pytest.mark.parametrize("name", ["new", "old", "rbg"])
def test_numbers_of_keys_are_lifted(name: str) -> None:
    key = KEYS[name]
    assert lifted(lambda k: jax.random.bits(jax.random.fold_in(k, 7)), key) == [7]
    assert lifted(lambda k: jax.random.bits(jax.random.split(k, 9)[5]), key) == [5]
    assert lifted(lambda k: [jax.random.bits(x) for x in jax.random.split(k, 6)], key) == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_an_index_among_few_keys_stays() -> None:
    assert lifted(lambda k: [jax.random.bits(x) for x in jax.random.split(k, 3)], KEYS["new"]) == []


def test_other_numbers_stay() -> None:
    def fn(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (8, 2))
        return x[5] * 3 + jax.lax.dynamic_slice(x, (6, 0), (1, 2))[0]

    assert lifted(fn, KEYS["new"]) == []


@pytest.mark.parametrize("name", KEYS)
def test_lifting_changes_no_bit(name: str) -> None:
    def fn(key: jax.Array) -> list[jax.Array]:
        if name == "old-rbg":
            key = jax.random.wrap_key_data(key, impl="rbg")
        keys = jax.random.split(key, 7)
        return [jax.random.bits(k) for k in (keys[3], *keys[4:], jax.random.fold_in(keys[0], 11))]

    closed = flatten(fn, KEYS[name])
    eqns, values = lift_key_constants(closed.jaxpr.eqns)
    assert sorted(map(int, values.values())) == [0, 3, 4, 11]
    jaxpr = closed.jaxpr.replace(eqns=eqns, invars=[*closed.jaxpr.invars, *values])
    run = _jax.jaxpr_as_fun(_jax.ClosedJaxpr(jaxpr, closed.consts))
    found = run(KEYS[name], *map(jnp.asarray, values.values()))
    np.testing.assert_array_equal(np.stack(found), np.stack(fn(KEYS[name])))
