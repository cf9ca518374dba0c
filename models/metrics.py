"""What people quote of translations: perplexity, and BLEU of what a model writes word by word."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from jvpipe.models.blocks import Logits, prediction_loss
from jvpipe.models.tokens import marks_of
from jvpipe.util.extras import extra


def perplexity(logits: Logits, params: Any, batches: Iterable[Any]) -> float:
    """Computes the perplexity of the targets of some batches: e to the mean of nats, without dropout or smoothing."""
    loss = jax.jit(lambda batch: prediction_loss(logits(params, batch, None), batch))
    losses = [loss(batch) for batch in batches]
    return float(np.exp(sum(float(x.total) for x in losses) / sum(float(x.weight) for x in losses)))


def bleu(written: Sequence[str], references: Sequence[str]) -> float:
    """BLEU (sacrebleu) of some sentences, from 0 to 100, whatever the case of letters.

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
    """What a model writes for some sentences if each token is its likeliest.

    Args:
        logits: maps (params, batch, None) to those of every position; they must not look ahead.
        params: of the model.
        tokenizer: that of its training.
        sentences: what is read; longer ones than `tokens` are cut off.
        tokens: how many are read, and how many are written at most.
        batch_size: how many sentences are translated together.
    """
    marks, texts = marks_of(tokenizer), []
    read = [
        [*x.ids[: tokens - 1], marks.end]
        for x in tokenizer.encode_batch(list(sentences), add_special_tokens=False)
    ]
    write = jax.jit(partial(_greedy, logits, start=marks.start))
    for i in range(0, len(read), batch_size):
        group = read[i : i + batch_size]
        inputs, lengths = np.zeros((batch_size, tokens), np.int32), np.ones(batch_size, np.int32)
        for j, ids in enumerate(group):
            inputs[j, : len(ids)], lengths[j] = ids, len(ids)
        written = np.asarray(write(params, {"inputs": inputs, "lengths": lengths}))[: len(group)]
        ends = [(*np.flatnonzero(row == marks.end), tokens)[0] for row in written]
        texts += tokenizer.decode_batch(
            [row[:end].tolist() for row, end in zip(written, ends, strict=True)]
        )
    return [text.strip() for text in texts]


def _greedy(logits: Logits, params: Any, batch: Any, start: int) -> Int[Array, "B T"]:
    """The model runs over all positions for each token: slower than need be, and with no code but its own."""
    size, tokens = batch["inputs"].shape

    def write(i: Any, written: Int[Array, "B W"]) -> Int[Array, "B W"]:
        scores = logits(params, {**batch, "tokens": written[:, :-1]}, None)
        chosen = jnp.argmax(jax.lax.dynamic_index_in_dim(scores, i, 1, keepdims=False), -1)
        return jax.lax.dynamic_update_index_in_dim(written, chosen.astype(jnp.int32), i + 1, 1)

    return jax.lax.fori_loop(0, tokens, write, jnp.full((size, tokens + 1), start, jnp.int32))[
        :, 1:
    ]
