from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.models import Batches, load
from jvpipe.models.tokens import CLS
from jvpipe.models.workload import Batch, Workload
from tests.models.plain import gelu, linear, norm, shaken

SHAPE: dict[str, Any] = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 300, "tokens": 8}
KEY = jax.random.key(7)


def tiny(**options: Any) -> Workload:
    return load("gpt2", "tiny", **{**SHAPE, **options})


def fake_batch(workload: Workload, size: int = 3, seed: int = 0) -> Batch:
    rng, config = np.random.default_rng(seed), workload.config
    tokens = rng.integers(5, config.vocabulary, (size, config.tokens + 1)).astype(np.int32)
    weights = rng.integers(0, 2, (size, config.tokens)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def plain_loss(params: dict, batch: Batch) -> tuple[float, float]:
    """One block, two heads, written out token by token."""
    p, total, weight = params["blocks"]["000"], 0.0, 0.0
    table = params["embeddings"]["tokens"]["embedding"]
    for tokens, targets, weights in zip(
        batch["tokens"], batch["targets"], batch["weights"], strict=True
    ):
        xs = [
            table[t] + params["embeddings"]["positions"]["embedding"][i]
            for i, t in enumerate(tokens)
        ]
        qkv = [linear(norm(x, p["attention_norm"]), p["attention"]["inputs"]) for x in xs]
        for i, (x, target, w) in enumerate(zip(xs, targets, weights, strict=True)):
            heads = []
            for h in range(2):
                q, k, v = (slice(16 * part + 8 * h, 16 * part + 8 * h + 8) for part in range(3))
                powers = [np.exp(qkv[i][q] @ qkv[j][k] / 8**0.5) for j in range(i + 1)]
                heads.append(sum(e * qkv[j][v] for j, e in enumerate(powers)) / sum(powers))
            y = x + linear(np.concatenate(heads), p["attention"]["output"])
            y = y + linear(
                gelu(linear(norm(y, p["feed_forward_norm"]), p["expand"])), p["contract"]
            )
            logits = table @ norm(y, params["head"]["norm"])
            total += float(w * (np.log(np.exp(logits).sum()) - logits[target]))
            weight += float(w)
    return total, weight


def test_loss_is_that_of_a_plain_reference() -> None:
    workload = tiny()
    params, batch = shaken(workload), fake_batch(workload)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    total, weight = plain_loss(wide, batch)
    loss = jax.jit(workload.loss_fn)(params, batch, KEY)
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)
    assert loss.weight == weight > 0


def test_nobody_looks_ahead() -> None:
    workload = tiny(blocks=2)
    params, batch = shaken(workload), fake_batch(workload)
    loss = jax.jit(
        lambda tokens, weights: workload.loss_fn(
            params, batch | {"tokens": tokens, "weights": weights}, KEY
        )
    )
    until = np.broadcast_to((np.arange(8) <= 4).astype(np.float32), (3, 8))
    first = loss(batch["tokens"], until).total
    for at, told in ((4, True), (5, False)):
        tokens = batch["tokens"].copy()
        tokens[:, at] += 1
        assert (loss(tokens, until).total != first) == told


def test_770m_is_planned_without_its_parameters() -> None:
    workload = load("gpt2", "770m")
    params = jax.eval_shape(workload.init, KEY)
    V, D, T, L = 50257, 1280, 1024, 36
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == (V + T) * D + L * (12 * D * D + 13 * D) + 2 * D
    assert count == pytest.approx(770e6, rel=0.01)
    loss = jax.eval_shape(workload.loss_fn, params, workload.abstract_batch(2), KEY)
    assert loss.total.shape == loss.weight.shape == ()


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters() -> None:
    workload, exact = tiny(dtype="bfloat16"), tiny()
    params, batch = shaken(workload), fake_batch(workload)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: workload.loss_fn(p, batch, KEY).total))(
        params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves((params, gradient))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, jax.jit(exact.loss_fn)(params, batch, KEY).total, rtol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "largest"}, "unknown size of gpt2 'largest'"),
        ({"dropuot": 0.1}, "unknown option of gpt2 'dropuot': did you mean 'dropout'"),
        ({"heads": 3}, "width=256 is not divisible by heads=3"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("gpt2", **arguments)


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
    assert isinstance(data.train, Batches)
    shapes = {name: (x.shape, x.dtype) for name, x in workload.abstract_batch(4).items()}
    for batch in [next(data.train), *data.held_out]:
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == shapes
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        assert (batch["tokens"][:, 0] == CLS).all()
        assert (batch["targets"] != CLS).all()
    assert 1 < data.baseline_loss < np.log(300)


def test_a_pipeline_trains_it() -> None:
    workload = tiny()
    params, batch = shaken(workload), fake_batch(workload, size=4)
    pipe = jvpipe.Pipeline(
        workload.loss_fn, optax.sgd(0.05), stages=2, microbatches=2, planner="even"
    )
    state = pipe.init(params, batch, KEY)
    losses = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    plain = jax.jit(workload.loss_fn)(params, batch, None)
    np.testing.assert_allclose(losses[0], plain.total / plain.weight, rtol=1e-5)
    assert losses[1] < losses[0]
    assert [p.array.name for p in pipe.session.graph.tied()] == ["embeddings/tokens/embedding"]
