from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jvpipe.models import load
from jvpipe.models.t5 import CrossAttention, T5Config
from jvpipe.models.workload import Batch, Workload
from jvpipe.trace.model import trace_model

SHAPE: dict[str, Any] = {"blocks": 2, "width": 16, "heads": 2, "vocabulary": 300, "tokens": 8}
KEY = jax.random.key(7)


def tiny(**options: Any) -> Workload:
    return load("t5", "tiny", **{**SHAPE, **options})


def fake_batch(workload: Workload, size: int = 3) -> Batch:
    rng, config = np.random.default_rng(0), workload.config
    inputs, tokens, targets = rng.integers(5, config.vocabulary, (3, size, config.tokens)).astype(
        np.int32
    )
    weights = rng.integers(0, 2, (size, config.tokens)).astype(np.float32)
    return {"inputs": inputs, "tokens": tokens, "targets": targets, "weights": weights}


def params_of(workload: Workload) -> dict:
    return jax.jit(workload.init)(KEY)


@pytest.mark.thorough
def test_the_decoder_looks_at_all_that_was_read_and_back() -> None:
    workload = tiny()
    params, batch = params_of(workload), fake_batch(workload)
    batch["weights"] = np.broadcast_to((np.arange(8) <= 4).astype(np.float32), (3, 8))
    loss = jax.jit(lambda changed: workload.loss_fn(params, batch | changed, KEY).total)
    first = loss({})
    for name, at, told in (
        ("inputs", 0, True),
        ("inputs", 7, True),
        ("tokens", 4, True),
        ("tokens", 5, False),
    ):
        other = batch[name].copy()
        other[:, at] += 1
        assert (loss({name: other}) != first) == told, (name, at)


def test_cross_attention_is_that_of_a_plain_reference() -> None:
    attention = CrossAttention(T5Config(**SHAPE, dropout=0.0), rngs=nnx.Rngs(0))
    p: Any = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(attention, nnx.Param)))
    x, read = np.random.default_rng(0).normal(size=(2, 1, 8, 16)).astype(np.float32)
    q = x[0] @ p["queries"]["kernel"] + p["queries"]["bias"]
    k, v = np.split(read[0] @ p["inputs"]["kernel"] + p["inputs"]["bias"], 2, axis=1)
    mixed = np.zeros((8, 16))
    for h in (slice(0, 8), slice(8, 16)):
        powers = np.exp(q[:, h] @ k[:, h].T / 8**0.5)
        mixed[:, h] = powers @ v[:, h] / powers.sum(1, keepdims=True)
    expected = mixed @ p["output"]["kernel"] + p["output"]["bias"]
    np.testing.assert_allclose(
        attention(jnp.asarray(x), jnp.asarray(read), None)[0], expected, rtol=1e-4, atol=1e-5
    )


def test_what_was_read_skips_to_every_block_of_the_decoder() -> None:
    workload = tiny(blocks=3)
    params = jax.eval_shape(workload.init, KEY)
    graph = trace_model(workload.loss_fn, params, workload.abstract_batch(2), KEY).traced.graph
    read = max(graph.skips(), key=lambda tensor: len(tensor.readers))
    names = {graph.layers[i].name for i in read.readers}
    assert {f"decoder/{i:03}" for i in range(3)} <= {
        "/".join(name.split("/")[:2]) for name in names
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"buckets": 2}, "buckets=2 must be at least 4"),
        ({"buckets": 8, "distance": 4}, "distance=4 must be more than 4, half of buckets=8"),
        ({"published": False, "gated": True}, "gated=True needs published=True: give both"),
        ({"published": False, "scaled": False}, "scaled=False needs published=True: give both"),
    ],
)
def test_fields_that_do_not_fit_are_refused(options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny(**{"published": True, **options})


def test_the_fewest_classes_of_distances_have_a_loss() -> None:
    workload = tiny(published=True, blocks=1, buckets=4, distance=3)
    params = jax.eval_shape(workload.init, KEY)
    assert jax.eval_shape(workload.loss_fn, params, workload.abstract_batch(2), KEY)


def test_780m_is_planned_without_its_parameters() -> None:
    workload = load("t5", "780m")
    V, D, L = 32128, 1024, 24
    block, reading = 12 * D * D + 13 * D, 4 * D * D + 4 * D + 2 * D
    leaves = jax.tree.leaves(jax.eval_shape(workload.init, KEY))
    count = sum(leaf.size for leaf in leaves)
    assert count == V * D + 2 * L * block + L * reading + 4 * D + (V * D + V)
    assert count == pytest.approx(780e6, rel=0.02)


def test_data_fits_the_plan_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words, rng = (
        ["layer", "stage", "schedule", "update", "gradient", "buffer", "device"],
        np.random.default_rng(0),
    )
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(rng.choice(words, 60)) + "." for _ in range(150)))
    workload = tiny()
    data = workload.open_data(text, tmp_path / "run", 0, 4)
    shapes = {name: (x.shape, x.dtype) for name, x in workload.abstract_batch(4).items()}
    for batch in [next(data.train), *data.held_out]:
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == shapes
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    loss = jax.jit(workload.loss_fn)(params_of(workload), data.held_out[0], None)
    assert abs(float(loss.total / loss.weight) - np.log(300)) < 0.7
