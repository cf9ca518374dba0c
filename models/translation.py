"""Translations as training data: two texts of which each line of one translates that of the other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.batches import fixed_batches, train_batches
from jvpipe.models.catalogues import Pair, catalogue_pairs
from jvpipe.models.text import frequency_loss, halves
from jvpipe.models.text_files import read_text
from jvpipe.models.tokens import SEP, cached, marks_of, open_tokenizer
from jvpipe.models.workload import Batch, Data

_HELD_OUT_SHARE, _HELD_OUT = 10, 2000  # one pair in so many, so many at most
_NONE = -1


@dataclass(frozen=True)
class Parallel:
    """Sentences and their translations to train on, and those held out."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of all."""
        whole = hashlib.sha256()
        for pair in (*self.train, *self.held_out):
            whole.update("\t".join((*pair, "\n")).encode())
        return whole.hexdigest()


def open_parallel(path: Path | None, languages: str) -> Parallel:
    """The pairs in a folder; if None, those of the message catalogues that Django carries.

    For `languages` such as `en-de`, the folder has files `NAME.en` and `NAME.de`. Those called `valid` are held out;
    without them, and in the catalogues, a tenth is.

    Raises:
        ValueError: there are no such files, they cannot be read, or their numbers of lines differ.
    """
    source, _, target = languages.partition("-")
    if not (source and target and source != target):
        raise ValueError(
            f"languages='{languages}' must be two, that which is read and that which is written: en-de"
        )
    if path is None:
        return _split(catalogue_pairs(source, target))
    names = sorted(
        file.stem for file in path.glob(f"*.{source}") if file.with_suffix(f".{target}").is_file()
    )
    if not set(names) - {"valid"}:
        raise ValueError(
            f"there are no two files such as train.{source} and train.{target} in '{path}': name a folder of them, and "
            f"languages other than {languages} by --set languages=..."
        )
    texts = {name: _read(path / f"{name}.{source}", path / f"{name}.{target}") for name in names}
    held_out = texts.pop("valid", None)
    train = [pair for name in texts for pair in texts[name]]
    return _split(train) if held_out is None else Parallel(tuple(train), tuple(held_out))


def open_translation(
    data_path: Path | None,
    run_dir: Path,
    seed: int,
    batch_size: int,
    *,
    languages: str,
    vocabulary: int,
    tokens: int,
) -> Data:
    """Pairs as batches of `inputs`, their `lengths`, and what is to be written: `tokens`, `targets` and `weights`.

    Both languages have one vocabulary; the tokenizer is kept in `run_dir`. Pairs of more than `tokens` ids on one side
    are left out.

    Raises:
        ValueError: what `open_parallel` and `open_tokenizer` raise, or all pairs are too long.
    """
    pairs = open_parallel(data_path, languages)
    tokenizer = open_tokenizer(run_dir, [text for pair in pairs.train for text in pair], vocabulary)
    records, held_out_records = (
        _records(part, tokenizer, tokens) for part in (pairs.train, pairs.held_out)
    )
    if not len(records) or not len(held_out_records):
        raise ValueError(
            f"'{data_path}' gives {len(records)} pairs of at most {tokens} tokens to train on and "
            f"{len(held_out_records)} to hold out: give more text, or --sequence-length"
        )
    held_out = fixed_batches(held_out_records, translated, batch_size)
    written = records[:, tokens + 1 :]
    first = min(SEP, marks_of(tokenizer).first)
    return Data(
        train=train_batches(records, translated, seed, batch_size),
        example=held_out[0],
        held_out=held_out,
        digest=pairs.digest,
        baseline_loss=frequency_loss(
            written[written != _NONE][None], held_out, tokenizer.get_vocab_size(), first
        ),
    )


def translated(record: Int32[np.ndarray, "T"], generator: np.random.Generator) -> Batch:
    """An example of a record; what fills it up is 0, with a weight of 0.

    >>> example = translated(np.array([7, 2, -1, 1, 8, 2, -1], np.int32), np.random.default_rng(0))
    >>> example["inputs"].tolist(), example["lengths"].item(), example["tokens"].tolist(), example["targets"].tolist()
    ([7, 2, 0], 2, [1, 8, 2], [8, 2, 0])
    >>> example["weights"].tolist()
    [1.0, 1.0, 0.0]
    """
    example = halves(record, generator)
    present = {name: example[name] != _NONE for name in ("inputs", "targets")}
    filled = {name: np.maximum(example[name], 0) for name in ("inputs", "tokens", "targets")}
    return filled | {
        "lengths": np.sum(present["inputs"], dtype=np.int32),
        "weights": present["targets"].astype("f4"),
    }


def pack_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, tokens: int
) -> Int32[np.ndarray, "N T"]:
    """Records of 2 `tokens` + 1: a sentence and an end, a start, its translation and an end, each filled up with -1."""
    marks = marks_of(tokenizer)
    rows = []
    for i in range(0, len(pairs), 256):
        read, written = (
            tokenizer.encode_batch(list(side), add_special_tokens=False)
            for side in zip(*pairs[i : i + 256], strict=True)
        )
        for a, b in zip(read, written, strict=True):
            if 0 < len(a.ids) < tokens and 0 < len(b.ids) < tokens:
                row = np.full(2 * tokens + 1, _NONE, np.int32)
                row[: len(a.ids) + 1] = [*a.ids, marks.end]
                row[tokens : tokens + len(b.ids) + 2] = [marks.start, *b.ids, marks.end]
                rows.append(row)
    return np.stack(rows) if rows else np.zeros((0, 2 * tokens + 1), np.int32)


def _records(pairs: Sequence[Pair], tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "N T"]:
    texts = [text for pair in pairs for text in pair]
    return cached(f"pairs-{tokens}", texts, tokenizer, lambda: pack_pairs(pairs, tokenizer, tokens))


def _read(source: Path, target: Path) -> list[Pair]:
    left, right = (read_text(file).removesuffix("\n").split("\n") for file in (source, target))
    if len(left) != len(right):
        longer, alone = (source, target) if len(left) > len(right) else (target, source)
        raise ValueError(
            f"'{source}' has {len(left)} lines and '{target}' {len(right)}: line {min(len(left), len(right)) + 1} of "
            f"'{longer.name}' has none beside it in '{alone.name}'"
        )
    pairs = ((" ".join(a.split()), " ".join(b.split())) for a, b in zip(left, right, strict=True))
    return [(a, b) for a, b in pairs if a and b]


def _split(pairs: Sequence[Pair]) -> Parallel:
    """The sentences of least hash are held out, with all their translations."""
    hashes = [hashlib.sha256(source.encode()).digest() for source, _ in pairs]
    bound = (
        sorted(hashes)[max(1, min(_HELD_OUT, len(pairs) // _HELD_OUT_SHARE)) - 1] if pairs else b""
    )
    parts: tuple[list[Pair], list[Pair]] = ([], [])
    for key, pair in zip(hashes, pairs, strict=True):
        parts[key <= bound].append(pair)
    return Parallel(tuple(parts[0]), tuple(parts[1]))
