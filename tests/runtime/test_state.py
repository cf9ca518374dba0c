"""Arrays are placed one after another, and what is needed beside them is counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.training_state import made_leaves

D = 16


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def init(key: jax.Array) -> Any:
    """Each matrix takes more while it is made than it holds."""
    return [
        jnp.sort(jax.random.normal(k, (64, D * D)), axis=0)[31].reshape(D, D)
        for k in jax.random.split(key, 3)
    ]


def pipeline(**options: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 2, 2, planner="even", **options)


def test_what_making_parameters_takes_is_counted_and_kept_under_the_limit() -> None:
    batch, key = np.ones((2, D), np.float32), jax.random.key(0, impl="unsafe_rbg")
    pipe = pipeline()
    pipe.init(init, batch, key)
    while_made, step = (
        pipe.ledger.peak_bytes,
        max(peak.bytes for peak in pipe.session.compiled.peaks),
    )
    most = max(while_made.values())
    assert most > step, "the case shows nothing"
    pipeline(memory_limit=most).init(init, batch, key)
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="while its arrays are made") as told:
        pipeline(memory_limit=most - 1).init(init, batch, key)
    assert told.value.smallest_limit_bytes == most


def test_a_state_shows_what_lies_where_and_no_array() -> None:
    batch, params = np.ones((2, D), np.float32), [np.eye(D, dtype=np.float32)] * 3
    pipe = pipeline(devices=jax.devices()[:2])
    assert repr(pipe).endswith("2 devices: call init)")
    first = pipe.init(params, batch, None)
    shown = repr(first).splitlines()
    assert shown[0] == "State(step=0, updates=0)"
    assert [line.split()[0] for line in shown[1:]] == ["on", *map(str, jax.devices()[:2])]
    assert [line.split()[2] for line in shown[2:]] == [
        "2.00",
        "1.00",
    ]  # KiB, of two layers and of one
    table = repr(pipe).splitlines()
    assert table[1].split() == ["stage", "on", "layers", "holds", "peak"]
    devices = list(map(str, jax.devices()[:2]))
    assert [line.split()[:2] for line in table[2:]] == [["0", devices[0]], ["1", devices[1]]]
    pipe.step(first, batch)
    assert repr(first) == "State(step=0, updates=0), consumed by a later step"


def test_a_pipeline_is_not_traced() -> None:
    batch, params = np.ones((2, D), np.float32), [np.eye(D, dtype=np.float32)] * 3
    pipe = pipeline()
    state = pipe.init(params, batch, None)
    cure = "this state is being traced: call the pipeline's members outside of jax.jit"
    with pytest.raises(ValueError, match=cure):
        jax.jit(pipe.step)(state, batch)
    with pytest.raises(ValueError, match="the only batch leaf is being traced"):
        jax.jit(lambda x: pipe.step(state, x))(batch)
    pipe.step(state, batch)


def test_a_callback_sees_each_step_of_a_run() -> None:
    batch, params = np.ones((2, D), np.float32), [np.eye(D, dtype=np.float32)] * 3
    pipe, seen = pipeline(), list[tuple[int, float]]()
    begun = pipe.init(params, batch, None)

    def note(state: jvpipe.State, metrics: Any) -> None:
        seen.append((state.step, float(metrics["loss"])))

    steps = [
        (state.step, float(metrics["loss"]))
        for state, metrics in pipe.run(begun, [batch] * 3, num_steps=2, on_step=note)
    ]
    assert seen == steps
    assert [step for step, _ in seen] == [1, 2]
    with pytest.raises(
        ValueError, match=r"on_step must be a function of \(state, metrics\), not 3"
    ):
        next(pipe.run(begun, [batch], on_step=3))  # pyright: ignore[reportArgumentType]


def test_a_limit_that_is_named_is_enough_to_make_the_parameters() -> None:
    batch, key = np.ones((2, D), np.float32), jax.random.key(0, impl="unsafe_rbg")

    def pipeline(limit: int) -> jvpipe.Pipeline:
        return jvpipe.Pipeline(
            loss_fn, optax.sgd(0.1), 2, 2, devices=jax.devices()[:2], memory_limit=limit
        )

    with pytest.raises(jvpipe.MemoryLimitExceeded) as told:
        pipeline(1).init(init, batch, key)
    pipe = pipeline(told.value.smallest_limit_bytes)
    pipe.init(init, batch, key)
    most = max(pipe.ledger.peak_bytes.values())
    assert most > max(peak.bytes for peak in pipe.session.compiled.peaks), "the case shows nothing"
    assert most == told.value.smallest_limit_bytes


def test_leaves_alike_are_made_by_one_program_however_their_keys_were_derived() -> None:
    def init(key: jax.Array) -> list[jax.Array]:
        leaves = []
        for _ in range(5):  # a key each, split off one after the other
            key, own = jax.random.split(key)
            leaves.append(jax.random.normal(own, (3, 2)))
        return leaves

    store, key, device = ProgramStore(), jax.random.key(3), jax.devices()[1]
    leaves = made_leaves(store, init, key)
    made = [leaf.make(device, ()) for leaf in leaves]
    assert len({leaf.program.key for leaf in leaves if leaf.program}) == 1
    for ours, plain in zip(made, jax.jit(init)(key), strict=True):
        assert ours.devices() == {device}
        np.testing.assert_array_equal(ours, plain)
