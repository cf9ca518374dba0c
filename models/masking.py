"""Masked-language modelling: which tokens are hidden, and how well one can guess them without reading."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jvpipe.models.batches import fixed_batches, train_batches
from jvpipe.models.corpus import open_corpus
from jvpipe.models.tokens import MASK, SPECIAL_TOKENS, cached_records, open_tokenizer
from jvpipe.models.workload import Batch, Data

_HELD_OUT_TOKENS = 32768
_FIRST = len(SPECIAL_TOKENS)


def mask_record(
    record: Int32[np.ndarray, "T"],
    generator: np.random.Generator,
    *,
    vocabulary: int,
    masked: int,
    mask_rate: float,
) -> Batch:
    """Hides a share `mask_rate` of a record's ordinary tokens, `masked` (K) at most (arXiv:1810.04805, 3.1).

    Of those, 80% become [MASK], 10% a random token and 10% stay. Returns `tokens` [T], and `positions`, `targets`
    and `weights` [K]: weight 1 where there is a token to predict, 0 in the rest.
    """
    ordinary = np.flatnonzero(record >= _FIRST)
    count = min(masked, len(ordinary), max(1, round(mask_rate * len(ordinary))))
    chosen = np.sort(generator.choice(ordinary, count, replace=False))
    fate = generator.random(count)
    hidden = np.where(fate < 0.8, MASK, generator.integers(_FIRST, vocabulary, count))
    tokens = record.copy()
    tokens[chosen] = np.where(fate < 0.9, hidden, record[chosen])
    filled = partial(np.pad, pad_width=(0, masked - count))
    return {
        "tokens": tokens,
        "positions": filled(chosen.astype(np.int32)),
        "targets": filled(record[chosen]),
        "weights": filled(np.ones(count, np.float32)),
    }


def frequency_loss(records: Int32[np.ndarray, "N T"], held_out: Sequence[Batch], vocabulary: int) -> float:
    """The mean loss, in nats, of predicting masked tokens by how often each occurs in `records`, plus one."""
    counts = np.bincount(records.reshape(-1), minlength=vocabulary)[_FIRST:] + 1.0
    losses = np.log(counts.sum()) - np.log(counts)
    total = sum(float((losses[batch["targets"] - _FIRST] * batch["weights"]).sum()) for batch in held_out)
    return total / sum(float(batch["weights"].sum()) for batch in held_out)


def open_masked_text(
    data_path: Path | None,
    run_dir: Path,
    seed: int,
    batch_size: int,
    *,
    vocabulary: int,
    tokens: int,
    masked: int,
    mask_rate: float,
) -> Data:
    """Text as batches of masked records; the tokenizer is kept in `run_dir`.

    Raises:
        ValueError: what `open_corpus` and `open_tokenizer` raise, and a text too short for one record.

    """
    corpus = open_corpus(data_path)
    documents, held_out_documents = corpus.split()
    tokenizer = open_tokenizer(run_dir, documents, vocabulary)
    records = cached_records(documents, tokenizer, tokens)
    held_out_records = cached_records(held_out_documents, tokenizer, tokens)[: max(1, _HELD_OUT_TOKENS // tokens)]
    if not len(records) or not len(held_out_records):
        raise ValueError(
            f"'{data_path}' gives {len(records)} records of {tokens} tokens to train on and {len(held_out_records)} "
            "to hold out: give more text"
        )
    known = tokenizer.get_vocab_size()
    transform = partial(mask_record, vocabulary=known, masked=masked, mask_rate=mask_rate)
    held_out = fixed_batches(held_out_records, transform, batch_size)
    return Data(
        train=train_batches(records, transform, seed, batch_size),
        held_out=held_out,
        digest=corpus.digest,
        baseline_loss=frequency_loss(records, held_out, known),
    )
