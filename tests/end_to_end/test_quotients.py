"""Arrays that are divided by a scalar have the same bits in whatever program divides them."""

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

WEIGHTS = 3


def divided(params: Any, batch: Any, rng: Any) -> Any:
    x = batch["x"]
    for w in params["w"]:
        x = jnp.tanh(x @ (w / params["t"]))
    return jnp.mean((x - batch["y"]) ** 2)


def trained(optimizer: optax.GradientTransformation, **options: Any) -> list[np.ndarray]:
    """The parameters after two steps, `t` left out, as it may be frozen."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    params = {"w": [0.4 * normal(8, 8) for _ in range(WEIGHTS)], "t": np.float32(1.3)}
    batch = {"x": normal(16, 8), "y": normal(16, 8)}
    pipe = jvpipe.Pipeline(divided, optimizer, microbatches=2, planner="even", **options)
    state = pipe.init(params, batch, None)
    for _ in range(2):
        state, _ = pipe.step(state, batch)
    return [np.asarray(w) for w in pipe.params(state)["w"]]


def frozen() -> optax.GradientTransformation:
    """SGD that leaves `t` as it is."""
    labels = {"w": ["moved"] * WEIGHTS, "t": "kept"}
    by_label: dict[Hashable, optax.GradientTransformation] = {
        "moved": optax.sgd(1.0),
        "kept": optax.set_to_zero(),
    }
    return optax.multi_transform(by_label, labels)


@pytest.mark.parametrize(
    ("optimizer", "usual", "other"),
    [
        # The halves of a backward read the scalar once each, a whole backward reads it twice.
        (optax.sgd(1.0), {"schedule": "1f1b"}, {"schedule": "zb-h1"}),
        # A recomputed value reads it once more than a kept one.
        (frozen(), {"fates": {"*": "keep"}}, {"fates": {"*dot_general*": "recompute"}}),
        # The norm of all gradients asks for those that are left out otherwise.
        (frozen(), {}, {"grad_norm": True}),
    ],
)
def test_a_quotient_has_the_same_bits_beside_other_readers_of_its_divisor(
    optimizer: optax.GradientTransformation, usual: dict[str, Any], other: dict[str, Any]
) -> None:
    first = trained(optimizer, stages=2, **usual)
    second = trained(optimizer, stages=2, **other)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)
