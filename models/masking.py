"""Masked-language modelling: which tokens are hidden, or in which order they are predicted."""

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
    """Hides a share `mask_rate` of a record's ordinary tokens, `masked` (K) at most (arXiv:1810.04805, 3.1).

    80% of them become the mask of `marks`, 10% a random token, and 10% stay. Returns `tokens` [T], and `positions`,
    `targets` and `weights` [K]: weight 1 where there is a token to predict, 0 in the rest.
    """
    assert marks.mask is not None, "looked at before"
    chosen = np.sort(_chosen(record, generator, masked, mask_rate, marks))
    # From 0 to 0.8 the mask, to 0.9 a random token, to 1 the token itself.
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
    """Chooses a share `mask_rate` of ordinary tokens, `masked` (K) at most, in the order of their prediction.

    Returns the `tokens` [T] as they are, and `positions`, `targets` and `weights` [K]: weight 1 where there is a token
    to predict, 0 in the rest (arXiv:1906.08237, 2.3).
    """
    # Not sorted, unlike masked ones: their order is that of prediction.
    chosen = _chosen(record, generator, masked, mask_rate, marks)
    return {"tokens": record} | _predictions(record, chosen, masked)


def _chosen(
    record: Record, generator: np.random.Generator, masked: int, mask_rate: float, marks: Marks
) -> np.ndarray:
    """Positions of ordinary tokens, in a random order."""
    ordinary = np.flatnonzero(~np.isin(record, marks.special))
    share = max(1, round(mask_rate * len(ordinary)))
    count = min(masked, len(ordinary), share)
    return generator.choice(ordinary, count, replace=False)


def _predictions(record: Record, chosen: np.ndarray, masked: int) -> Batch:
    """What is predicted, filled up to `masked` (K) so that all records have one shape."""
    filled = partial(np.pad, pad_width=(0, masked - len(chosen)))
    return {
        "positions": filled(chosen.astype(np.int32)),
        "targets": filled(record[chosen]),
        "weights": filled(np.ones(len(chosen), np.float32)),
    }


@runtime_checkable
class Predicted(Protocol):
    """How text is to be predicted: the fields of a model's configuration."""

    @property
    def vocabulary(self) -> int:
        """Tokens of a tokenizer that is made."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens of a record."""
        ...

    @property
    def masked(self) -> int:
        """How many of them are predicted at most."""
        ...

    @property
    def mask_rate(self) -> float:
        """Which share of them is."""
        ...


def open_masked_text(
    config: Predicted, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Text as batches of masked records; arguments and errors are those of `open_text`."""

    def transform(vocabulary: int, marks: Marks) -> Transform:
        if marks.mask is None:
            raise ValueError(
                f"the tokenizer of {vocabulary} tokens has no [MASK] or <mask>, which stands for a token that is to "
                "be predicted: add one to it"
            )
        rates = {"masked": config.masked, "mask_rate": config.mask_rate}
        return partial(mask_record, vocabulary=vocabulary, marks=marks, **rates)

    sizes: dict[str, Any] = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    sizes["first"] = OURS.first
    return open_text(data_path, run_dir, seed, batch_size, transform=transform, **sizes)


def open_permuted_text(
    config: Predicted, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Text as batches of records that are predicted in a random order; as `open_text` otherwise."""

    def transform(vocabulary: int, marks: Marks) -> Transform:
        rates = {"masked": config.masked, "mask_rate": config.mask_rate}
        return partial(permute_record, marks=marks, **rates)

    sizes: dict[str, Any] = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    sizes["first"] = OURS.first
    return open_text(data_path, run_dir, seed, batch_size, transform=transform, **sizes)
