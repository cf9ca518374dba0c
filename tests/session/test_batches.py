"""Batches of any type that a device can take are split and reach their layer; what cannot be a
batch is named.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.runtime.engine.feeds import feeds_of
from jvpipe.trace.batches import micro_batch_shapes, shapes_of
from tests.session.test_arguments import PARAMS, D, loss_fn, losses, narrow, pipeline, wide


def test_shapes_are_those_that_leaves_have_on_a_device() -> None:
    assert shapes_of(wide()) == shapes_of(narrow()), "64 bits become 32"
    assert shapes_of(narrow()) == shapes_of(jax.eval_shape(lambda: narrow())), (
        "of shapes alone as of arrays"
    )
    for other in (
        narrow() | {"more": 1},
        {"x": narrow()["x"][:4], "label": narrow()["label"]},
        list(narrow().values()),
    ):
        assert shapes_of(other) != shapes_of(narrow())


def test_micro_batches_share_the_leading_axis() -> None:
    shapes = micro_batch_shapes(narrow(), 4)
    assert (shapes["x"].shape, shapes["label"].shape) == ((2, D), (2,))
    with pytest.raises(
        ValueError,
        match=r"3 micro-batches do not divide the 8 examples of batch leaf '\w+': the nearest that do are 2 and 4. "
        r"Drop an incomplete last batch \(drop_remainder=True in most loaders\), or pad it with examples of weight 0",
    ):
        micro_batch_shapes(narrow(), 3)
    with pytest.raises(ValueError, match="the 8 examples of the only batch leaf: the nearest"):
        micro_batch_shapes(narrow()["x"], 3)
    with pytest.raises(
        ValueError, match=r"differ in their leading axis: \{'label': \(8,\), 'x': \(4,\)\}"
    ):
        micro_batch_shapes(narrow() | {"x": narrow()["x"][:4]}, 2)
    with pytest.raises(ValueError, match="the batch holds no arrays"):
        micro_batch_shapes({}, 2)


def test_each_micro_batch_reads_its_slice_and_a_seed_of_its_own() -> None:
    feeds = feeds_of(narrow(), np.array([7, 9], np.uint32), step=5, microbatches=2)
    np.testing.assert_array_equal(np.concatenate(feeds["batch", 1]), narrow()["x"])
    assert [part.shape for part in feeds["batch", 1]] == [(4, D)] * 2
    assert [np.asarray(seed).tolist() for seed in feeds["seed", 0]] == [[7, 9, 5, 0], [7, 9, 5, 1]]
    assert ("seed", 0) not in feeds_of(narrow(), None, step=5, microbatches=2)


def test_batches_of_numpys_own_types_train_as_on_a_device() -> None:
    found = losses(wide())  # first, while no program has been called with the narrow types
    expected = losses(narrow())
    assert found == expected
    assert losses(narrow(), wide()) == expected
    assert losses(jax.eval_shape(lambda: narrow()), wide()) == expected


def test_a_batch_of_lists_of_arrays_is_a_tree() -> None:
    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss_fn(params, {"x": batch[0], "label": batch[1][0]}, rng)

    b = narrow()
    assert losses([b["x"], [b["label"]]], loss=loss) == losses(b)


def test_types_are_made_canonical_once_and_what_agrees_is_not_copied() -> None:
    b = narrow() | {"wide": np.arange(8)}
    feeds = feeds_of(b, None, 0, 2)
    label, wide, x = (feeds["batch", i] for i in range(3))
    assert all(np.shares_memory(part, b["label"]) for part in label)
    assert all(np.shares_memory(part, b["x"]) for part in x)
    assert [part.dtype for part in wide] == [np.int32, np.int32]
    assert all(isinstance(part, np.ndarray) for part in wide)


def test_64_bits_stay_where_jax_runs_with_them() -> None:
    with jax.enable_x64(True):
        params = [w.astype(np.float64) for w in PARAMS]
        pipe = pipeline()
        state, metrics = pipe.step(pipe.init(params, wide(), None), wide())
        expected, gradients = jax.value_and_grad(loss_fn)(params, wide(), None)
        assert metrics["loss"].dtype == np.float64
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-12)
        for new, w, g in zip(pipe.params(state), params, gradients, strict=True):
            assert new.dtype == np.float64
            np.testing.assert_allclose(new, w - 0.1 * g, rtol=1e-12)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]


def chained(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("model", [chained, scanned])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_weights_of_a_loss_of_64_bits_have_64_bits(model: Any, schedule: str) -> None:
    def loss(params: Any, batch: Any, rng: Any) -> jvpipe.Weighted:
        x, mask = batch
        squares = jnp.square(model(params, x)).sum(1)
        return jvpipe.Weighted((squares * mask).sum(), mask.sum())

    def whole(params: Any, batch: Any) -> jax.Array:
        total, weight = loss(params, batch, None)
        return total / weight

    draw = np.random.default_rng(0)
    params = draw.normal(0, 0.5, (2, D, D))
    params = params if model is scanned else list(params)
    with jax.enable_x64(True):
        batch = draw.normal(size=(8, D)), draw.random(8)
        microbatches = 2 if schedule == "1f1b" else 1
        pipe = jvpipe.Pipeline(loss, optax.sgd(0.1), 1, microbatches, schedule)
        state, metrics = pipe.step(pipe.init(params, batch, None), batch)
        expected, gradients = jax.value_and_grad(whole)(params, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-12)
        wanted = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        for new, w in zip(
            jax.tree.leaves(pipe.params(state)), jax.tree.leaves(wanted), strict=True
        ):
            assert new.dtype == np.float64
            np.testing.assert_allclose(new, w, rtol=1e-12)


@pytest.mark.parametrize("planner", ["even", "jvpipe"])
def test_keys_in_a_batch_are_split_with_it(planner: str) -> None:
    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(batch["key"])
        return loss_fn(params, batch | {"x": batch["x"] + noise}, rng)

    batch = narrow() | {"key": jax.random.split(jax.random.key(1, impl="unsafe_rbg"), 8)}
    pipe = pipeline(loss, planner=planner)
    _, metrics = pipe.step(pipe.init(PARAMS, batch, None), batch)
    expected = np.mean(
        [
            loss(PARAMS, jax.tree.map(lambda x, h=h: x[h], batch), None)
            for h in (np.s_[:4], np.s_[4:])
        ]
    )
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(
        pipe.evaluate(pipe.init(PARAMS, batch, None), batch)["loss"], expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.float16, jnp.bfloat16, jnp.int4, np.complex128]
)
def test_a_batch_leaf_of_any_type_reaches_its_layer(dtype: Any) -> None:
    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss_fn(params, batch, rng) + jnp.mean(batch["extra"].real.astype(np.float32))

    extra = (np.arange(8) % 2).astype(dtype)
    assert losses(narrow() | {"extra": extra}, loss=loss)[0] == pytest.approx(
        losses(narrow())[0] + 0.5, rel=1e-6
    )


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            "train",
            "batch leaf 'extra' is of type str, which is not an array: keep it out of the batch",
        ),
        (np.array(["a"] * 8), "batch leaf 'extra' is of type ndarray <U1, which no device has"),
        (np.array([None] * 8), "batch leaf 'extra' is of type ndarray object, which no device has"),
        (
            np.ma.masked_array(np.ones(8)),
            "batch leaf 'extra' is of type MaskedArray float64, which no device has",
        ),
        (np.ones(8, ">f4"), "batch leaf 'extra' is of type ndarray >f4, which no device has"),
        (
            0.5,
            "batch leaf 'extra' is a scalar: every leaf needs a leading batch axis, so let the "
            "loss capture it",
        ),
        ([0.5] * 8, "batch leaf 'extra/0' is a scalar.*; convert a list of numbers to one array"),
    ],
)
def test_what_no_device_can_hold_is_named(leaf: Any, message: str) -> None:
    batch = narrow() | {"extra": leaf}
    with pytest.raises(ValueError, match=message):
        pipeline().init(PARAMS, batch, None)
    pipe = pipeline()
    state = pipe.init(PARAMS, narrow(), None)
    with pytest.raises(ValueError, match=message):
        pipe.step(state, batch)
