from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.models import load
from jvpipe.models.workload import Batch
from jvpipe.models.xlnet import logits_function
from tests.models.plain import gelu, linear, norm, shaken
from tests.zoo import quick_key

SHAPE: dict[str, Any] = {
    "blocks": 2,
    "width": 8,
    "heads": 2,
    "vocabulary": 300,
    "tokens": 8,
    "mask_rate": 0.5,
}
KEY = quick_key(7)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Of eight tokens 6, 1 and 4 are predicted, in this order; of the other record but one."""
    tokens = np.random.default_rng(0).integers(5, 300, (2, 8)).astype(np.int32)
    positions = np.array([[6, 1, 4, 0], [3, 0, 0, 0]], np.int32)
    weights = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.float32)
    targets = np.take_along_axis(tokens, positions, 1)
    return {"tokens": tokens, "positions": positions, "targets": targets, "weights": weights}


def looked(p: dict, x: np.ndarray, known: np.ndarray, at: int, seen: list[int]) -> np.ndarray:
    """What one row finds in those that it sees."""
    q, mixed = x @ p["queries"]["kernel"], np.zeros(8)
    k, v = np.split(known @ p["inputs"]["kernel"], 2, axis=1)
    for h in (slice(0, 4), slice(4, 8)):
        powers = []
        for j in seen:
            angles = (at - j) * 10000 ** -(np.arange(4) / 3)
            far = np.concatenate([np.sin(angles), np.cos(angles)]) @ p["distances"]["kernel"]
            near = (q + p["of_tokens"])[h] @ k[j, h]
            powers.append(np.exp((near + (q + p["of_distances"])[h] @ far[h]) / 2))
        mixed[h] = np.array(powers) @ v[seen, h] / sum(powers)
    return mixed @ p["output"]["kernel"]


def plain_logits(p: dict, tokens: np.ndarray, predicted: list[int]) -> np.ndarray:
    """Of the predicted positions of one record, stream by stream."""
    others = [t for t in range(8) if t not in predicted]
    sees = {
        t: others + predicted[: predicted.index(t) + 1] if t in predicted else others
        for t in range(8)
    }
    table = p["embeddings"]["tokens"]["embedding"]
    known, asking = table[tokens], np.stack([p["embeddings"]["unknown"]] * len(predicted))
    for block in (p["blocks"]["000"], p["blocks"]["001"]):

        def after(x: np.ndarray, y: np.ndarray, block: dict = block) -> np.ndarray:
            x = norm(x + y, block["attention_norm"])
            fed = linear(gelu(linear(x, block["expand"])), block["contract"])
            return norm(x + fed, block["feed_forward_norm"])

        found = [looked(block["attention"], known[t], known, t, sees[t]) for t in range(8)]
        asked = [
            looked(block["attention"], asking[i], known, t, others + predicted[:i])
            for i, t in enumerate(predicted)
        ]
        asking = np.stack([after(x, y) for x, y in zip(asking, asked, strict=True)])
        known = np.stack([after(x, y) for x, y in zip(known, found, strict=True)])
    return asking @ table.T + p["head"]["bias"]


def test_logits_are_those_of_a_plain_reference(batch: Batch) -> None:
    workload = load("xlnet", "tiny", **SHAPE)
    params = shaken(workload)
    assert workload.config.masked == 4
    found = jax.jit(logits_function(workload.config))(params, batch, None)
    for b, predicted in enumerate(([6, 1, 4], [3])):
        expected = plain_logits(params, batch["tokens"][b], predicted)
        np.testing.assert_allclose(found[b, : len(predicted)], expected, rtol=1e-3, atol=1e-4)


def test_a_token_is_predicted_from_those_before_it_in_the_order_alone(batch: Batch) -> None:
    workload = load("xlnet", "tiny", **SHAPE)
    params = shaken(workload)
    logits = jax.jit(logits_function(workload.config))
    first = logits(params, batch, None)[0]
    for at, told in ((6, [1, 2]), (1, [2]), (4, []), (2, [0, 1, 2])):
        tokens = batch["tokens"].copy()
        tokens[0, at] += 1
        changed = logits(params, batch | {"tokens": tokens}, None)[0]
        assert [k for k in range(3) if (changed[k] != first[k]).any()] == told, at


@pytest.mark.parametrize(("size", "blocks", "published"), [("24", 24, 360e6), ("36", 36, 500e6)])
def test_parameters_of_the_published_sizes(size: str, blocks: int, published: float) -> None:
    workload = load("xlnet", size)
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, KEY)))
    V, D = 32000, 1024
    assert count == V * D + D + V + blocks * (5 * D * D + 2 * D + 8 * D * D + 5 * D + 4 * D)
    assert count == pytest.approx(published, rel=0.05)
