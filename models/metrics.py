"""Metrics of translation models: perplexity, and the BLEU score of greedy translations."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from jvpipe.models.losses import Logits, prediction_loss
from jvpipe.models.tokens import marks_of
from jvpipe.util.extras import extra


def perplexity(logits: Logits, params: Any, batches: Iterable[Any]) -> float:
    """Computes the perplexity of the targets in some batches, without dropout or smoothing.

    It is exp(mean nats per target).
    """
    loss = jax.jit(lambda batch: prediction_loss(logits(params, batch, None), batch))
    losses = [loss(batch) for batch in batches]
    # A mean of the batches' means would be wrong, because their weights have different sums.
    nats = sum(float(x.total) for x in losses)
    weight = sum(float(x.weight) for x in losses)
    return float(np.exp(nats / weight))


def bleu(written: Sequence[str], references: Sequence[str]) -> float:
    """Computes sacrebleu's BLEU score of some sentences, from 0 to 100, ignoring case.

    >>> round(bleu(["the cat sat on the mat", "a dog"], ["The cat sat on the mat", "a dog"]))
    100
    """
    with extra("translation"):
        from sacrebleu import corpus_bleu
    return corpus_bleu(list(written), [list(references)], lowercase=True).score


def translate(
    logits: Logits,
    params: Any,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    *,
    tokens: int,
    batch_size: int = 64,
) -> list[str]:
    """Translates sentences greedily: each new token is the most likely one, given those before it.

    Args:
        logits: maps (params, batch, None) to the logits of every position. No position may look
            ahead.
        params: the parameters of the model.
        tokenizer: the tokenizer that the model was trained with.
        sentences: the sentences to translate; each is truncated to `tokens` tokens, including its
            end mark.
        tokens: the greatest number of tokens of a sentence and of its translation.
        batch_size: how many sentences are translated together.
    """
    marks, texts = marks_of(tokenizer), []
    encodings = tokenizer.encode_batch(list(sentences), add_special_tokens=False)
    read = [[*encoding.ids[: tokens - 1], marks.end] for encoding in encodings]
    write = jax.jit(partial(_greedy, logits, start=marks.start))
    for i in range(0, len(read), batch_size):
        group = read[i : i + batch_size]
        # Padding makes the last group a full batch, so the program is compiled once.
        inputs = np.zeros((batch_size, tokens), np.int32)
        lengths = np.ones(batch_size, np.int32)
        for j, ids in enumerate(group):
            inputs[j, : len(ids)] = ids
            lengths[j] = len(ids)
        written = np.asarray(write(params, {"inputs": inputs, "lengths": lengths}))
        rows = [_until(marks.end, row) for row in written[: len(group)]]
        texts += tokenizer.decode_batch(rows)
    return [text.strip() for text in texts]


def _until(end: int, ids: np.ndarray) -> list[int]:
    """Returns the ids before the first `end`, or all ids if there is none."""
    ends = np.flatnonzero(ids == end)
    return ids[: ends[0]].tolist() if len(ends) else ids.tolist()


def _greedy(logits: Logits, params: Any, batch: Any, start: int) -> Int[Array, "B T"]:
    """Generates token after token. For each token, the model runs over all T positions.

    This costs T times as much as with a cache of keys and values, but needs no extra code.
    """
    size, tokens = batch["inputs"].shape

    def write(i: Any, written: Int[Array, "B W"]) -> Int[Array, "B W"]:
        # Positions after i still hold the start mark. Position i does not look ahead, so it does
        # not see them.
        scores = logits(params, {**batch, "tokens": written[:, :-1]}, None)  # [B, T, V]
        scores = jax.lax.dynamic_index_in_dim(scores, i, 1, keepdims=False)  # [B, V]
        chosen = jnp.argmax(scores, -1).astype(jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(written, chosen, i + 1, 1)

    first = jnp.full((size, tokens + 1), start, jnp.int32)
    written = jax.lax.fori_loop(0, tokens, write, first)
    return written[:, 1:]
