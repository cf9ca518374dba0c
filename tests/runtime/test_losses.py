"""Losses that are no numbers are told, and take nothing away: neither a state nor what an optimizer
is there for.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

D, MICRO = 4, 2
PARAMS = [
    {"w": 0.3 * np.eye(D, dtype=np.float32) + 0.1 * i, "b": np.zeros(D, np.float32)}
    for i in range(3)
]
BAD = np.float32(np.nan)


class Scale(NamedTuple):
    scale: jax.Array
    inner: Any


def loss_scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Dynamic loss scaling: where a gradient is not finite the update is left out and the scale
    halved.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        finite = jnp.isfinite(optax.tree.norm(updates))
        updates = jax.tree.map(lambda g: g / 8, updates)  # of the loss
        new, inner = inner_update(updates, state.inner, params)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), inner, state.inner)
        new = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), new)
        return new, Scale(jnp.where(finite, state.scale, state.scale / 2), kept)

    inner_update = inner.update
    return optax.GradientTransformation(
        lambda params: Scale(jnp.float32(8), inner.init(params)), update
    )


GUARDS = {
    "apply_if_finite": (optax.apply_if_finite(optax.adam(1e-2), 5), "1f1b"),
    "zero_nans": (optax.chain(optax.zero_nans(), optax.adam(1e-2)), "gpipe"),
    "loss scaling": (loss_scaled(optax.adam(1e-2)), "1f1b"),
    "zero_nans in a stream": (optax.chain(optax.zero_nans(), optax.adam(1e-2)), "pipedream"),
}


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for p in params:
        x = jnp.tanh(x @ p["w"] + p["b"][None])
    return 8 * jnp.mean(x**2)


def batch(step: int, *, bad: bool = False) -> np.ndarray:
    x = np.random.default_rng(step).normal(size=(2 * MICRO, D)).astype(np.float32)
    x[-1] *= BAD if bad else 1
    return x


def pipeline(optimizer: Any, schedule: str, stages: int = 2) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(loss_fn, optimizer, stages, MICRO, schedule, planner="even")


def advanced(
    pipe: jvpipe.Pipeline, state: jvpipe.State, bad: tuple[int, ...], steps: range
) -> jvpipe.State:
    """Reads every loss, so that it is known at the next step."""
    for newest, metrics in pipe.run(state, (batch(i, bad=i in bad) for i in steps)):
        assert np.isfinite(float(metrics["loss"])) == (newest.step - 1 not in bad)
        state = newest
    return state


@pytest.mark.parametrize("guard", GUARDS)
def test_what_leaves_a_bad_step_out_trains_on_and_resumes(
    guard: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, schedule = GUARDS[guard]
    pipe, bad = pipeline(optimizer, schedule), (0, 2, 3)
    state = advanced(pipe, pipe.init(PARAMS, batch(0), None), bad, range(2))
    pipe.save(tmp_path / "saved", state)
    state = pipe.wait(advanced(pipe, state, bad, range(2, 6)))
    params = jax.tree.leaves(pipe.params(state))
    assert all(np.isfinite(x).all() for x in params)
    told = [
        r.message for r in caplog.records if "no parameter is NaN, so training goes on" in r.message
    ]
    between = schedule == "pipedream"  # in a stream also after a micro-batch of the same step
    assert len(told) == 2 + between, "once, and once more after the loss had been a number"
    if schedule == "pipedream":
        assert told[0].startswith(
            "the loss of micro-batch 1 (step 0) is nan at stage 1, read with versions [0, 1]"
        )
    else:
        assert [text.split(";")[0] for text in told] == [
            f"the loss of step {i} is nan at stage 1" for i in (0, 2)
        ]

        @jax.jit
        def step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any]:
            updates, moments = optimizer.update(
                jax.grad(loss_fn)(params, batch, None), moments, params
            )
            return optax.apply_updates(params, updates), moments

        plain, moments = PARAMS, optimizer.init(PARAMS)  # what optax does alone
        for i in range(6):
            plain, moments = step(plain, moments, batch(i, bad=i in bad))
        for ours, theirs in zip(params, jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    other = pipeline(optimizer, schedule)  # goes on where the next loss is none
    resumed = pipe.wait(advanced(other, other.restore(tmp_path / "saved"), bad, range(2, 6)))
    for ours, theirs in zip(jax.tree.leaves(other.params(resumed)), params, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
def test_without_a_guard_the_run_stops_and_the_state_is_not_lost(schedule: str) -> None:
    pipe = pipeline(optax.adam(1e-2), schedule)
    seen = [(pipe.init(PARAMS, batch(0), None), 0.0)]
    stream = pipe.run(seen[0][0], (batch(i, bad=i == 2) for i in range(9)))
    with pytest.raises(
        ValueError, match=r"the loss of .*step 2\)? is nan at stage 1.* and parameter '0/b' is NaN"
    ):
        seen.extend((state, float(metrics["loss"])) for state, metrics in stream)
    assert len(seen) == 4 + (
        schedule == "pipedream"
    )  # told with the next step, or once that is under way
    assert np.isnan(pipe.params(seen[-1][0])[0]["b"]).all()
