"""The axis of the examples, followed through equations: what is found is true of slices, and the
rest is refused.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe import _jax
from jvpipe.trace.axes import along_after
from jvpipe.trace.flatten import flatten
from tests.grid import grid

MANY, FEW, T, D = 6, 2, 3, 4
W = np.arange(D * D, dtype=np.float32).reshape(D, D) / 8
KERNEL = np.ones((2, D, 5), np.float32)
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4)


def numbers(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(MANY, T, D)).astype(np.float32)[:size]


def looked_up(x: jax.Array) -> jax.Array:
    return jnp.asarray(TABLE)[jnp.argmax(x, -1)]


def picked(x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.argmax(x, -1)[..., None], -1)


KEPT: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
    "elementwise": (lambda x: jnp.tanh(x) * 2 + x, 0),
    "product": (lambda x: x @ W, 0),
    "product from the right": (lambda x: jnp.einsum("de,bte->dbt", W, x), 1),
    "batched product": (lambda x: jnp.einsum("btd,bsd->bts", x, x), 0),
    "transposed": (lambda x: x.transpose(2, 0, 1), 1),
    "merged": (lambda x: x.reshape(-1, D), 0),
    "merged and split": (lambda x: (x.reshape(-1, D) @ W).reshape(-1, T, D), 0),
    "behind tokens": (lambda x: x.transpose(1, 0, 2).reshape(T, -1), 1),
    "reduced elsewhere": (lambda x: x.transpose(1, 0, 2).sum(0), 0),
    "greatest of each": (lambda x: jnp.argmax(x, -1), 0),
    "softmax": (lambda x: jax.nn.softmax(x, -1), 0),
    "running sum of each": (lambda x: jnp.cumsum(x, 1), 0),
    "sorted each": (lambda x: jnp.sort(x, -1), 0),
    "the greatest few": (lambda x: jax.lax.top_k(x, 2)[0], 0),
    "some tokens": (lambda x: x[:, 1:], 0),
    "one token": (lambda x: x[:, 0], 0),
    "joined features": (lambda x: jnp.concatenate([x, x], -1), 0),
    "split features": (lambda x: jnp.split(x, 2, -1)[1], 0),
    "padded tokens": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), 0),
    "turned tokens": (lambda x: jnp.flip(x, 1), 0),
    "another axis": (lambda x: x[:, None], 0),
    "squeezed": (lambda x: x[:, :1].squeeze(1), 0),
    "convolution": (
        lambda x: jax.lax.conv_general_dilated(
            x, jnp.asarray(KERNEL), (1,), "SAME", (1,), (1,), ("NWC", "WIO", "NWC")
        ),
        0,
    ),
    "pooling": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "VALID"),
        0,
    ),
    "embedding": (looked_up, 0),
    "picked": (picked, 0),
    "transform": (lambda x: jnp.fft.fft(x).real, 0),
}
REFUSED: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "running sum": (lambda x: jnp.cumsum(x, 0), "from example to example"),
    "sorted": (lambda x: jnp.sort(x, 0), "sorts examples"),
    "turned": (lambda x: jnp.flip(x, 0), "reverses the examples"),
    "each with each": (lambda x: jnp.einsum("btd,ctd->bc", x, x), "every other"),
    "behind merged": (lambda x: x.transpose(1, 0, 2).reshape(-1, D), "mixes the examples' axis"),
    "transform": (lambda x: jnp.fft.fft(x, axis=0).real, "transforms over examples"),
    "half of them": (lambda x: x[: x.shape[0] // 2], "some of the examples"),
    "one beside another": (lambda x: jnp.concatenate([x, x], 0), "concatenates along the examples"),
    "a window": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1, 1), (1, 1, 1), "SAME"),
        "several examples",
    ),
    "looked up": (
        lambda x: x[jnp.arange(x.shape[0]), jnp.argmax(x[..., 0], -1)],
        "take_along_axis",
    ),
}


def followed(fn: Callable[[jax.Array], jax.Array]) -> Any:
    """The axis of the result of a function of [examples, tokens, features]; or why there is
    none.
    """
    closed, small = (flatten(fn, jax.ShapeDtypeStruct((n, T, D), np.float32)) for n in (MANY, FEW))
    axes: dict[Any, int | None] = {closed.jaxpr.invars[0]: 0}

    def run(eqns: Any, fewer: Any) -> str | None:
        for eqn, other in zip(eqns, fewer, strict=True):
            if eqn.primitive.name == "iota":  # positions of examples have them along an axis too
                axes[eqn.outvars[0]] = (
                    0
                    if _jax.aval(eqn.outvars[0]).shape != _jax.aval(other.outvars[0]).shape
                    else None
                )
                continue
            own = [axes.get(a) if isinstance(a, _jax.Var) else None for a in eqn.invars]
            if own.count(None) == len(own):
                continue
            both = [
                (_jax.aval(a).shape, _jax.aval(b).shape)
                for a, b in zip(eqn.outvars, other.outvars, strict=True)
            ]
            grown = [
                next((i for i, (x, y) in enumerate(zip(*pair, strict=True)) if x != y), None)
                for pair in both
            ]
            found = along_after(eqn, own, grown)
            if isinstance(found, str):
                return found
            axes.update(zip(eqn.outvars, found, strict=True))
        return None

    why = run(closed.jaxpr.eqns, small.jaxpr.eqns)
    return why or axes[closed.jaxpr.outvars[0]]


@pytest.mark.parametrize("name", grid(KEPT, *list(KEPT)[::3]))
def test_what_is_found_is_true_of_slices(name: str) -> None:
    fn, axis = KEPT[name]
    assert followed(fn) == axis
    whole, part = (
        np.asarray(fn(jnp.asarray(numbers(MANY)))),
        np.asarray(fn(jnp.asarray(numbers(FEW)))),
    )
    rows = part.shape[axis]
    np.testing.assert_allclose(np.take(whole, range(rows), axis), part, rtol=1e-5, atol=1e-6)
    assert rows * MANY == whole.shape[axis] * FEW


@pytest.mark.parametrize("name", REFUSED)
def test_examples_that_do_not_stay_apart_are_refused(name: str) -> None:
    fn, why = REFUSED[name]
    assert why in followed(fn)
