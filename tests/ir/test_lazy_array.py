"""Arrays that are read where they are to lie: one after another, once, with the bits of arrays that
are given.
"""

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.lazy_array import LazyArray

LAYERS, WIDTH = 16, 8


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), batch @ params["in"], params["blocks"]
    )
    return jnp.mean(x**2)


def given() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(0, WIDTH**-0.5, shape).astype(np.float32)  # noqa: E731
    return {"in": normal(WIDTH, WIDTH), "blocks": normal(LAYERS, WIDTH, WIDTH)}


def trained(params: Any) -> tuple[jvpipe.Pipeline, Any]:
    batch = np.ones((4, WIDTH), np.float32)
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=2, microbatches=2, planner="even")
    return pipe, pipe.init(params, batch, jax.random.key(0))


def test_a_pipeline_reads_each_layer_once_and_holds_few_of_them() -> None:
    arrays, reads, held = given(), list[tuple[Any, ...]](), WeakValueDictionary[int, np.ndarray]()

    def read(name: str, *at: int) -> np.ndarray:
        assert len(held) <= 3 * LAYERS // 4, (
            "what was read before is still held"
        )  # JAX lets go later
        reads.append((name, *at))
        held[len(reads)] = part = arrays[name][at].copy()
        return part

    lazy = {name: LazyArray(x.shape, x.dtype, partial(read, name)) for name, x in arrays.items()}
    pipe, state = trained(lazy)
    assert sorted(reads) == [*(("blocks", i) for i in range(LAYERS)), ("in",)]
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state), arrays)


def test_parts_are_read_alone() -> None:
    whole = np.arange(6.0).reshape(2, 3)
    lazy = LazyArray((2, 3), np.float64, lambda *at: whole[at])
    np.testing.assert_array_equal([np.asarray(row) for row in lazy], whole)
    np.testing.assert_array_equal(lazy[np.int64(1)], whole[1])
    with pytest.raises(IndexError, match="index 2 is out of bounds for an axis of size 2"):
        lazy[2]


@pytest.mark.parametrize(
    ("index", "told"),
    [(..., "Ellipsis"), (slice(0, 4, 2), r"slice\(0, 4, 2\)"), ((0, 1), r"\(0, 1\)")],
)
def test_an_index_that_is_not_taken_is_refused(index: Any, told: str) -> None:
    lazy = LazyArray((4, 3), np.float32, lambda *at: np.zeros((4, 3), np.float32)[at])
    with pytest.raises(ValueError, match=f"a whole number or a slice with step 1, not {told}: "):
        lazy[index]


def test_what_is_read_is_to_be_what_was_said() -> None:
    lazy = LazyArray((2,), np.float32, lambda: np.zeros(3))
    with pytest.raises(ValueError, match=r"returned float64\[3\], but it must return float32\[2\]"):
        np.asarray(lazy)
