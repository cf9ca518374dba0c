import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jvpipe.models import Batches, Workload, load

SHAPE: dict[str, Any] = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 300, "tokens": 16}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [
        "layer",
        "stage",
        "schedule",
        "update",
        "gradient",
        "buffer",
        "device",
        "memory",
        "forward",
    ]
    rng = np.random.default_rng(0)
    paragraphs = [" ".join(rng.choice(words, 60)) + "." for _ in range(150)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "brt"}, "unknown model 'brt': did you mean 'bert'"),
        ({"name": "bert", "size": "larg"}, "unknown size of bert 'larg': did you mean 'large'"),
        (
            {"name": "bert", "dropuot": 0.1},
            "unknown option of bert 'dropuot': did you mean 'dropout'",
        ),
        ({"name": "bert", "dtype": "bfloat"}, "unknown dtype 'bfloat': did you mean 'bfloat16'"),
        ({"name": "bert", "heads": 3}, "width=256 is not divisible by heads=3"),
        ({"name": "bert", "dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"name": "bert", "blocks": 0}, "blocks=0.* too small"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**arguments)


@pytest.mark.parametrize("size", ["mini", "base", "large", "48"])
def test_configurations_are_json(size: str) -> None:
    workload = load("bert", size)
    fields = json.loads(json.dumps(dataclasses.asdict(workload.config)))
    assert load("bert", size, **fields).config == workload.config
    assert workload.size == size


def test_data_fits_the_plan_and_the_model(text: Path, tmp_path: Path) -> None:
    workload = load("bert", **SHAPE)
    data = workload.open_data(text, tmp_path / "run", 0, 8)
    assert isinstance(data.train, Batches)
    abstract = workload.abstract_batch(8)
    for batch in [next(data.train), *data.held_out]:
        assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(
            lambda x: (x.shape, x.dtype), abstract
        )
    assert (tmp_path / "run" / "tokenizer.json").exists()
    assert len(data.digest) == 64
    params = jax.jit(workload.init)(jax.random.key(0))
    loss = jax.jit(workload.loss_fn)(params, data.held_out[0], None)
    assert abs(float(loss.total / loss.weight) - np.log(300)) < 0.5
    assert 1 < data.baseline_loss < np.log(300)


def test_a_seed_changes_the_order_and_nothing_else(text: Path, tmp_path: Path) -> None:
    workload = load("bert", **SHAPE)
    zero, again, one = (workload.open_data(text, tmp_path / "run", seed, 4) for seed in (0, 0, 1))
    first, same, other = (next(data.train)["tokens"] for data in (zero, again, one))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    jax.tree.map(np.testing.assert_array_equal, list(zero.held_out), list(one.held_out))
    assert (zero.digest, zero.baseline_loss) == (one.digest, one.baseline_loss)


def test_text_too_short_for_a_record(tmp_path: Path, text: Path) -> None:
    text.write_text("\n\n".join(text.read_text().split("\n\n")[:12]))
    with pytest.raises(
        ValueError,
        match=r"text\.txt' gives [01] records of 2048 tokens to train on and 0 to hold out",
    ):
        load("bert", **{**SHAPE, "tokens": 2048}).open_data(text, tmp_path / "run", 0, 4)


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_the_optimizer_follows_the_learning_rates(steps: int) -> None:
    workload: Workload = load("bert", **SHAPE)
    rates = workload.learning_rates(steps)
    assert rates.shape == (steps,)
    assert (rates > 0).all()
    optimizer = workload.optimizer(steps)
    params: Any = {"bias": np.zeros(1, np.float32)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    updates: Any
    for rate in rates:  # Adam's step of an unchanging gradient is the learning rate
        updates, state = update({"bias": np.ones(1, np.float32)}, state, params)
        np.testing.assert_allclose(updates["bias"], -rate, rtol=1e-3)
    if steps == 50:
        assert rates.argmax() == 4
        assert rates[-1] < 0.01 * rates.max()


def test_large_gradients_are_clipped_and_kernels_decay() -> None:
    optimizer = load("bert", **SHAPE).optimizer(1)
    params: Any = {"bias": np.ones(1, np.float32), "kernel": np.ones((1, 1), np.float32)}
    updates: Any = optimizer.update(
        jax.tree.map(np.zeros_like, params), optimizer.init(params), params
    )[0]
    assert updates["bias"] == 0
    assert updates["kernel"] < 0
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(lambda p: 1e6 * p, params), state, params)
    moments: Any = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moments["bias"], 0.1 / np.sqrt(2), rtol=1e-5)
