from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.models import load
from jvpipe.models.gnmt import logits_function
from tests.models.plain import linear, shaken
from tests.models.test_transformer import fake_batch
from tests.zoo import quick_key

SHAPE: dict[str, Any] = {"blocks": 3, "width": 6, "vocabulary": 300, "tokens": 8}
KEY = quick_key(7)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(p: dict, x: np.ndarray, context: np.ndarray | None = None) -> np.ndarray:
    """A layer, step by step."""
    if context is not None:
        kernel = np.concatenate([p["inputs"]["kernel"], p["context"]["kernel"]])
        p, x = p | {"inputs": p["inputs"] | {"kernel": kernel}}, np.concatenate([x, context], 1)
    h = c = np.zeros(6)
    found = []
    for row in x:
        i, f, g, o = np.split(linear(row, p["inputs"]) + h @ p["state"]["kernel"], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        found.append(h)
    return np.stack(found)


def plain_logits(p: dict, inputs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of one sentence, without what fills it up, and its translation."""
    x = p["source"]["tokens"]["embedding"][inputs]
    first = p["encoder_first"]
    x = np.concatenate([lstm(first["forward"], x), lstm(first["backward"], x[::-1])[::-1]], 1)
    x = lstm(p["encoder_second"]["lstm"], x)
    x = x + lstm(p["encoder"]["000"]["lstm"], x)
    y = lstm(p["decoder_first"]["lstm"], p["target"]["tokens"]["embedding"][tokens])
    a = p["attention"]
    v = a["length"] * a["output"] / np.linalg.norm(a["output"])
    found = []
    for q in y @ a["queries"]["kernel"]:
        powers = np.exp(np.tanh(q + linear(x, a["keys"])) @ v)
        found.append(powers @ x / powers.sum())
    context = np.stack(found)
    y = lstm(p["decoder_second"]["lstm"], y, context)
    y = y + lstm(p["decoder"]["000"]["lstm"], y, context)
    return linear(y, p["head"]["output"])


def test_logits_are_those_of_a_plain_reference() -> None:
    workload = load("gnmt", "tiny", **SHAPE)
    params, batch = shaken(workload), fake_batch(workload)
    found = jax.jit(logits_function(workload.config))(params, batch, None)
    for b, length in enumerate(batch["lengths"]):
        expected = plain_logits(params, batch["inputs"][b, :length], batch["tokens"][b])
        np.testing.assert_allclose(found[b], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("size", "blocks", "published"), [("8", 4, None), ("16", 8, 291e6)])
def test_parameters_of_the_published_sizes(size: str, blocks: int, published: float | None) -> None:
    workload = load("gnmt", size)
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, KEY)))
    V, D = 36548, 1024
    narrow, wide = 4 * (2 * D * D + D), 4 * (3 * D * D + D)
    encoder, decoder = 2 * narrow + wide + (blocks - 2) * narrow, narrow + (blocks - 1) * wide
    assert count == 2 * V * D + encoder + decoder + (2 * D * D + 2 * D + 1) + (V * D + V)
    if published:
        assert count == pytest.approx(published, rel=0.002)


def test_one_layer_is_refused() -> None:
    with pytest.raises(
        ValueError, match="blocks=1 is too small: encoder and decoder need two layers each"
    ):
        load("gnmt", "tiny", blocks=1)
