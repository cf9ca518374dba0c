from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jvpipe.models.metrics import bleu, perplexity, translate
from jvpipe.models.tokens import CLS, SEP, train_tokenizer

TEXTS = ["one small stage of layers", "devices update their memory", "a gradient"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 9, 300)


def one_hot(ids: Any) -> jax.Array:
    return jax.nn.one_hot(ids, 300)


def test_what_was_read_is_written(tokenizer: Tokenizer) -> None:
    sentences = [*TEXTS, "layers of memory"]
    echo = lambda params, batch, key: one_hot(batch["inputs"])  # noqa: E731
    assert translate(echo, None, tokenizer, sentences, tokens=24, batch_size=3) == sentences
    (cut,) = translate(echo, None, tokenizer, [" ".join(TEXTS)], tokens=8)
    assert TEXTS[0].startswith(cut)


def test_each_token_follows_from_the_one_before(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("layers of memory").ids
    after = np.zeros(300, np.int32)
    after[[CLS, *ids]] = [*ids, SEP]
    chain = lambda after, batch, key: one_hot(after[batch["tokens"]])  # noqa: E731
    assert (
        translate(chain, jnp.asarray(after), tokenizer, ["stage"] * 2, tokens=24)
        == ["layers of memory"] * 2
    )
    after[ids[-1]] = ids[0]
    (text,) = translate(chain, jnp.asarray(after), tokenizer, ["stage"], tokens=2 * len(ids))
    assert text == "layers of memory layers of memory"


def test_perplexity_is_that_of_the_targets_that_count() -> None:
    table = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    logits = lambda params, batch, key: jnp.broadcast_to(table, (*batch["targets"].shape, 4))  # noqa: E731
    one = {"targets": np.array([[0, 1, 3]]), "weights": np.array([[1, 1, 0]], np.float32)}
    two = {"targets": np.array([[SEP, 1, 3]]), "weights": np.array([[1, 0, 0]], np.float32)}
    assert perplexity(logits, None, [one, two]) == pytest.approx((2 * 4 * 8) ** (1 / 3))


def test_bleu_of_a_known_pair() -> None:
    """Precisions 5/6, 3/5, 2/4, 1/3 of as many words."""
    expected = 100 * np.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** 0.25
    assert bleu(["the cat sat on a mat"], ["The cat sat on the mat"]) == pytest.approx(expected)
