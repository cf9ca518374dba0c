"""Counts as published, and the loss of a record written out in numpy, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.models import Workload, load
from jvpipe.models.workload import Batch
from jvpipe.trace.model import trace_model
from tests.zoo import quick_key

COUNTS = {"1b": 1_235_814_400, "7b": 6_738_415_616, "8b": 8_030_261_248}  # Llama 3.2 1B, 2 7B, 3 8B


@pytest.mark.parametrize("size", COUNTS)
def test_parameters_are_as_many_as_published(size: str) -> None:
    params = jax.eval_shape(load("llama", size).init, jax.eval_shape(lambda: jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == COUNTS[size]


def fake_batch(size: int = 3) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 300, (size, 9)).astype(np.int32)
    weights = draw.integers(0, 2, (size, 8)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def shaken(workload: Workload) -> Any:
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(workload.init, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.tree.map(lambda leaf: draw.normal(0.1, 0.3, leaf.shape).astype(np.float32), shapes)


def plain_loss(params: Any, batch: Batch, tied: bool) -> float:
    """Of the tiny one: 4 heads of 4 numbers, two to a group."""

    def norm(x: np.ndarray, p: Any) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + 1e-5) * p["norm"]["scale"]

    def turned(x: np.ndarray, t: int) -> np.ndarray:  # pairs of numbers as complex ones
        z = (x[:2] + 1j * x[2:]) * np.exp(1j * t * 10000.0 ** (-np.arange(2) / 2))
        return np.concatenate([z.real, z.imag])

    def block(xs: list[np.ndarray], p: Any) -> list[np.ndarray]:
        a, mixed = p["attention"], []
        normed = [norm(x, p["attention_norm"]) for x in xs]
        for t, y in enumerate(normed):
            heads = []
            for h in range(4):
                own, group = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
                q = turned((y @ a["queries"]["kernel"])[own], t)
                keys = [
                    turned((y @ a["keys"]["kernel"])[group], s)
                    for s, y in enumerate(normed[: t + 1])
                ]
                weights = np.exp(np.array([q @ k / 2 for k in keys]))
                values = [(y @ a["values"]["kernel"])[group] for y in normed[: t + 1]]
                heads.append(weights / weights.sum() @ np.array(values))
            mixed.append(xs[t] + np.concatenate(heads) @ a["output"]["kernel"])
        after = []
        for x in mixed:
            y = norm(x, p["feed_forward_norm"])
            g = y @ p["gate"]["kernel"]
            after.append(
                x + (g / (1 + np.exp(-g)) * (y @ p["expand"]["kernel"])) @ p["contract"]["kernel"]
            )
        return after

    table, total = params["tokens"]["embedding"], 0.0
    head = table.T if tied else params["head"]["kernel"]
    for tokens, targets, weights in zip(
        batch["tokens"], batch["targets"], batch["weights"], strict=True
    ):
        xs = [table[token] for token in tokens]
        for i in range(4):
            xs = block(xs, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
        for x, target, weight in zip(xs, targets, weights, strict=True):
            logits = norm(x, params["norm"]) @ head
            total += weight * (np.log(np.exp(logits).sum()) - logits[target])
    return float(total)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_is_that_of_a_plain_reference(tied: bool) -> None:
    workload, batch = load("llama", "tiny", tied=tied), fake_batch()
    params = shaken(workload)
    loss = jax.jit(workload.loss_fn)(params, batch, None)
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    np.testing.assert_allclose(loss.total, plain_loss(wide, batch, tied), rtol=1e-4)
    assert loss.weight == batch["weights"].sum()


def test_the_scan_is_cut_between_blocks() -> None:
    workload = load("llama", "tiny")
    params, batch = jax.eval_shape(workload.init, quick_key(0)), workload.abstract_batch(2)
    graph = trace_model(workload.loss_fn, params, batch, quick_key(0)).traced.graph
    assert len(graph.layers) >= 2 + 4


@pytest.mark.thorough
def test_bfloat16_computes_near_float32_and_keeps_float32_parameters() -> None:
    workload, exact, batch = (
        load("llama", "tiny", dtype="bfloat16"),
        load("llama", "tiny"),
        fake_batch(),
    )
    params = jax.tree.map(np.asarray, jax.jit(exact.init)(quick_key(0)))
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: workload.loss_fn(p, batch, None).total))(
        params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves((params, gradient))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, jax.jit(exact.loss_fn)(params, batch, None).total, rtol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3}, "width=256 divided by heads=3 is not an even number"),
        ({"groups": 3}, "heads=4 is not divisible by groups=3"),
        ({"hidden": 0}, "hidden=0 must be at least 1"),
        ({"dropout": 0.1}, "dropout=0.1: a Llama has no dropout"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("llama", **arguments)
