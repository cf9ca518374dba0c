"""Masked language modeling: chooses the tokens to hide, or the order in which to predict them."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jvpipe.models.batches import Transform
from jvpipe.models.text import open_text
from jvpipe.models.tokens import OURS, Marks
from jvpipe.models.workload import Batch, Data

Record = Int32[np.ndarray, "T"]


def mask_record(
    record: Record,
    generator: np.random.Generator,
    *,
    vocabulary: int,
    masked: int,
    mask_rate: float,
    marks: Marks = OURS,
) -> Batch:
    """Hides a fraction `mask_rate` of a record's ordinary tokens, but at most `masked` (K) tokens.

    80% of the chosen tokens become the mask token of `marks`, 10% become a random token, and 10%
    stay unchanged (arXiv:1810.04805, section 3.1).

    Returns:
        `tokens` [T], and `positions`, `targets` and `weights` [K]. The weight is 1 for each token
        to predict, and 0 for the padding after them.
    """
    assert marks.mask is not None, "open_masked_text has checked it"
    chosen = np.sort(_chosen(record, generator, masked, mask_rate, marks))
    # A token with a number below 0.8 becomes the mask token, from 0.8 to 0.9 a random token; above
    # 0.9, it stays unchanged.
    fate = generator.random(len(chosen))
    others = generator.integers(marks.first, vocabulary, len(chosen))
    hidden = np.where(fate < 0.8, marks.mask, others)
    tokens = record.copy()
    tokens[chosen] = np.where(fate < 0.9, hidden, record[chosen])
    return {"tokens": tokens} | _predictions(record, chosen, masked)


def permute_record(
    record: Record,
    generator: np.random.Generator,
    *,
    masked: int,
    mask_rate: float,
    marks: Marks = OURS,
) -> Batch:
    """Chooses a fraction `mask_rate` of a record's ordinary tokens, but at most `masked` (K).

    The model predicts them in a random order (arXiv:1906.08237, section 2.3).

    Returns:
        The unchanged `tokens` [T], and `positions`, `targets` and `weights` [K] as in
        `mask_record`.
    """
    # `chosen` is not sorted as in `mask_record`, because its order is the order of prediction.
    chosen = _chosen(record, generator, masked, mask_rate, marks)
    return {"tokens": record} | _predictions(record, chosen, masked)


def _chosen(
    record: Record, generator: np.random.Generator, masked: int, mask_rate: float, marks: Marks
) -> np.ndarray:
    """Draws positions of ordinary tokens, in a random order."""
    ordinary = np.flatnonzero(~np.isin(record, marks.special))
    share = max(1, round(mask_rate * len(ordinary)))
    count = min(masked, len(ordinary), share)
    return generator.choice(ordinary, count, replace=False)


def _predictions(record: Record, chosen: np.ndarray, masked: int) -> Batch:
    """Pads the predicted tokens to `masked` (K) entries, so that all records have one shape."""
    filled = partial(np.pad, pad_width=(0, masked - len(chosen)))
    return {
        "positions": filled(chosen.astype(np.int32)),
        "targets": filled(record[chosen]),
        "weights": filled(np.ones(len(chosen), np.float32)),
    }


@runtime_checkable
class Predicted(Protocol):
    """The fields of a configuration that determine which tokens are predicted."""

    @property
    def vocabulary(self) -> int:
        """The largest vocabulary that the tokenizer may have."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens of a record."""
        ...

    @property
    def masked(self) -> int:
        """The largest number of predicted tokens of a record."""
        ...

    @property
    def mask_rate(self) -> float:
        """The fraction of a record's ordinary tokens that are predicted."""
        ...


def open_masked_text(
    config: Predicted, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens text as batches of masked records; the arguments are as in `open_text`."""

    def transform(vocabulary: int, marks: Marks) -> Transform:
        if marks.mask is None:
            raise ValueError(
                f"the tokenizer of {vocabulary} tokens has no token [MASK] or <mask> to hide "
                "tokens with: add one of them to it"
            )
        rates = {"masked": config.masked, "mask_rate": config.mask_rate}
        return partial(mask_record, vocabulary=vocabulary, marks=marks, **rates)

    sizes: dict[str, Any] = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    sizes["first"] = OURS.first
    return open_text(data_path, run_dir, seed, batch_size, transform=transform, **sizes)


def open_permuted_text(
    config: Predicted, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens text as batches whose tokens are predicted in a random order.

    The arguments are as in `open_text`.
    """

    def transform(vocabulary: int, marks: Marks) -> Transform:
        rates = {"masked": config.masked, "mask_rate": config.mask_rate}
        return partial(permute_record, marks=marks, **rates)

    sizes: dict[str, Any] = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    sizes["first"] = OURS.first
    return open_text(data_path, run_dir, seed, batch_size, transform=transform, **sizes)
