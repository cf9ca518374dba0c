from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.values import ValueKind
from jvpipe.models import load
from jvpipe.models.transformer import logits_function
from jvpipe.models.workload import Batch, Workload
from tests.lowering.test_step import lowered_case
from tests.models.plain import linear, norm, shaken
from tests.zoo import Case, quick_key

SHAPE: dict[str, Any] = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 300, "tokens": 8}
KEY = quick_key(7)


def fake_batch(workload: Workload, size: int = 3) -> Batch:
    rng, T = np.random.default_rng(0), workload.config.tokens
    inputs, tokens, targets = rng.integers(5, workload.config.vocabulary, (3, size, T)).astype(
        np.int32
    )
    lengths = rng.integers(3, T, size).astype(np.int32)
    weights = (np.arange(T)[None] < lengths[:, None]).astype(np.float32)
    return {
        "inputs": inputs,
        "lengths": lengths,
        "tokens": tokens,
        "targets": targets,
        "weights": weights,
    }


def looked(p: dict, x: np.ndarray, read: np.ndarray, allowed: Any) -> np.ndarray:
    """Attention of one head after the other, position by position."""
    q, both = linear(x, p["queries"]), linear(read, p["inputs"])
    k, v = both[:, :16], both[:, 16:]
    mixed = np.zeros_like(x)
    for h in (slice(0, 8), slice(8, 16)):
        for i in range(len(x)):
            powers = np.array(
                [np.exp(q[i, h] @ k[j, h] / 8**0.5) * allowed(i, j) for j in range(len(read))]
            )
            mixed[i, h] = powers @ v[:, h] / powers.sum()
    return linear(mixed, p["output"])


def normed(x: np.ndarray, p: dict) -> np.ndarray:
    return np.stack([norm(row, p) for row in x])


def fed(p: dict, x: np.ndarray) -> np.ndarray:
    y = linear(np.maximum(linear(x, p["expand"]), 0), p["contract"])
    return normed(x + y, p["feed_forward_norm"])


def embedded(p: dict, tokens: np.ndarray) -> np.ndarray:
    rates = [10000 ** -(i / 7) for i in range(8)]
    places = [[f(t * rate) for f in (np.sin, np.cos) for rate in rates] for t in range(len(tokens))]
    return p["embeddings"]["tokens"]["embedding"][tokens] * 4 + np.array(places)


def plain_logits(p: dict, batch: Batch, b: int) -> np.ndarray:
    """Of one pair of sentences, written out."""
    encoder, decoder, length = p["encoder"]["000"], p["decoder"]["000"], batch["lengths"][b]
    x = embedded(p, batch["inputs"][b])
    x = normed(
        x + looked(encoder["attention"], x, x, lambda i, j: j < length), encoder["attention_norm"]
    )
    read = fed(encoder, x)
    y = embedded(p, batch["tokens"][b])
    y = normed(
        y + looked(decoder["attention"], y, y, lambda i, j: j <= i), decoder["attention_norm"]
    )
    y = normed(
        y + looked(decoder["reading"], y, read, lambda i, j: j < length), decoder["reading_norm"]
    )
    return fed(decoder, y) @ p["embeddings"]["tokens"]["embedding"].T


def test_logits_and_smoothed_loss_are_those_of_a_plain_reference() -> None:
    workload = load("transformer", "tiny", **SHAPE, smoothing=0.2)
    params, batch = shaken(workload), fake_batch(workload)
    expected = np.stack([plain_logits(params, batch, b) for b in range(3)])
    found = jax.jit(logits_function(workload.config))(params, batch, None)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    shares = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    right = np.take_along_axis(shares, batch["targets"][..., None], -1)[..., 0]
    nats = -(0.8 * right + 0.2 * shares.mean(-1))
    loss = jax.jit(workload.loss_fn)(params, batch, KEY)
    np.testing.assert_allclose(loss.total, (nats * batch["weights"]).sum(), rtol=1e-3)


@pytest.mark.parametrize(
    ("size", "V", "D", "published"), [("base", 37000, 512, 65e6), ("big", 37000, 1024, 213e6)]
)
def test_parameters_of_the_published_sizes(size: str, V: int, D: int, published: float) -> None:
    workload = load("transformer", size)
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, KEY)))
    looking, feeding, scale = 4 * D * D + 4 * D, 8 * D * D + 5 * D, 2 * D
    assert count == V * D + 6 * (looking + feeding + 2 * scale) + 6 * (
        2 * looking + feeding + 3 * scale
    )
    assert count == pytest.approx(published, rel=0.03)


def test_what_was_read_goes_straight_to_each_stage_of_the_decoder_once() -> None:
    workload = load("transformer", "tiny", **{**SHAPE, "blocks": 4})
    case = Case(workload.loss_fn, shaken(workload), fake_batch(workload), KEY)
    graph, plan, step = lowered_case(case, 4, "1f1b", micro=4)
    read = max(range(len(graph.tensors)), key=lambda i: len(graph.tensors[i].readers))
    readers = graph.tensors[read].readers
    assert len({graph.layers[i].name for i in readers} & {f"decoder/{i:03}" for i in range(4)}) == 4
    home, reading = plan.stage_of(graph.tensors[read].producer), {plan.stage_of(i) for i in readers}
    assert len(reading - {home}) >= 2
    copies = [step.buffers[row.writes[0]].spot for row in step.rows if row.kind is Kind.SEND]
    sent = [
        spot.place
        for spot in copies
        if (spot.value.kind, spot.value.index) == (ValueKind.TENSOR, read)
    ]
    assert sorted(sent) == sorted([*(reading - {home})] * 4)
