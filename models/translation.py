"""Sentence pairs as training data: two text files whose lines are translations of each other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.batches import fixed_batches, train_batches
from jvpipe.models.catalogs import Pair, catalog_pairs
from jvpipe.models.text import frequency_loss, halves
from jvpipe.models.text_files import lines_in
from jvpipe.models.tokens import SEP, cached, marks_of, open_tokenizer
from jvpipe.models.workload import Batch, Data

_NONE = -1
"""The id of padding in records. No tokenizer has a token with this id."""
Pairs = Sequence[Pair]
Records = Int32[np.ndarray, "N T"]


@dataclass(frozen=True)
class Parallel:
    """Pairs of a sentence and its translation, to train on and to hold out."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 digest of all pairs."""
        whole = hashlib.sha256()
        for pair in (*self.train, *self.held_out):
            line = "\t".join((*pair, "\n"))
            whole.update(line.encode())
        return whole.hexdigest()


def open_parallel(path: Path | None, languages: str) -> Parallel:
    """Opens the sentence pairs in a folder; if None, the pairs from Django's message catalogs.

    For the languages `en-de`, the folder has files `NAME.en` and `NAME.de`. The pairs of `valid.en`
    and `valid.de` are held out. Without these files, a tenth of all pairs is held out, but about
    2000 pairs at most.

    Raises:
        ValueError: the folder has no such files, a file cannot be read, or two files differ in
            their number of lines.
    """
    source, _, target = languages.partition("-")
    if not (source and target and source != target):
        raise ValueError(
            f"languages='{languages}' must be two, the source and the target language, such as "
            "en-de"
        )
    if path is None:
        return _split(catalog_pairs(source, target))
    sources = path.glob(f"*.{source}")
    names = sorted(file.stem for file in sources if file.with_suffix(f".{target}").is_file())
    if not set(names) - {"valid"}:
        raise ValueError(
            f"there are no two files such as train.{source} and train.{target} in '{path}': give "
            f"a folder of such files, or languages other than {languages} by --set languages=..."
        )
    texts = {}
    for name in names:
        texts[name] = _read(path / f"{name}.{source}", path / f"{name}.{target}")
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
    """Opens sentence pairs as batches of `inputs`, `lengths`, `tokens`, `targets` and `weights`.

    `translators.loss_of` describes the batches. Both languages share one tokenizer, which is stored
    in `run_dir`. A pair with `tokens` or more ids on one side is left out, because the end mark
    would not fit.

    Raises:
        ValueError: as in `open_parallel` and `open_tokenizer`; or all pairs are too long.
    """
    pairs = open_parallel(data_path, languages)
    tokenizer = open_tokenizer(run_dir, [text for pair in pairs.train for text in pair], vocabulary)
    records = _records(pairs.train, tokenizer, tokens)
    held_out_records = _records(pairs.held_out, tokenizer, tokens)
    if not len(records) or not len(held_out_records):
        raise ValueError(
            f"'{data_path}' gives {len(records)} pairs of fewer than {tokens} tokens to train on "
            f"and {len(held_out_records)} to hold out: give more text, or a larger "
            "--sequence-length"
        )
    held_out = fixed_batches(held_out_records, translated, batch_size)
    written = records[:, tokens + 1 :]  # the predicted ids
    ids, vocab_size = written[written != _NONE], tokenizer.get_vocab_size()
    first = min(SEP, marks_of(tokenizer).first)
    return Data(
        train=train_batches(records, translated, seed, batch_size),
        example=held_out[0],
        held_out=held_out,
        digest=pairs.digest,
        baseline_loss=frequency_loss(ids, held_out, vocab_size, first),
    )


def translated(record: Int32[np.ndarray, "T"], generator: np.random.Generator) -> Batch:
    """Makes an example from a record. Padding becomes 0, with a weight of 0.

    >>> example = translated(np.array([7, 2, -1, 1, 8, 2, -1], np.int32), np.random.default_rng(0))
    >>> example["inputs"].tolist(), example["lengths"].item()
    ([7, 2, 0], 2)
    >>> example["tokens"].tolist(), example["targets"].tolist()
    ([1, 8, 2], [8, 2, 0])
    >>> example["weights"].tolist()
    [1.0, 1.0, 0.0]
    """
    example = halves(record, generator)
    is_input, is_target = example["inputs"] != _NONE, example["targets"] != _NONE
    filled = {name: np.maximum(example[name], 0) for name in ("inputs", "tokens", "targets")}
    return filled | {
        "lengths": np.sum(is_input, dtype=np.int32),
        "weights": is_target.astype("f4"),
    }


def pack_pairs(pairs: Pairs, tokenizer: Tokenizer, tokens: int) -> Records:
    """Makes records of 2 `tokens` + 1 ids: a source, then a target, each padded with `_NONE`.

    a a a $ - - - - | ^ b b b b $ - - -        `tokens` is 8, ^ the start mark, $ the end mark
    """
    marks = marks_of(tokenizer)
    encoded = partial(tokenizer.encode_batch, add_special_tokens=False)
    rows = []
    for i in range(0, len(pairs), 256):
        chunk = pairs[i : i + 256]
        read = encoded([source for source, _ in chunk])
        written = encoded([target for _, target in chunk])
        for source, target in zip(read, written, strict=True):
            a, b = source.ids, target.ids
            if 0 < len(a) < tokens and 0 < len(b) < tokens:
                row = np.full(2 * tokens + 1, _NONE, np.int32)
                left = [*a, marks.end]
                right = [marks.start, *b, marks.end]
                row[: len(left)] = left
                row[tokens : tokens + len(right)] = right
                rows.append(row)
    return np.stack(rows) if rows else np.zeros((0, 2 * tokens + 1), np.int32)


def _records(pairs: Pairs, tokenizer: Tokenizer, tokens: int) -> Records:
    texts = [text for pair in pairs for text in pair]
    return cached(f"pairs-{tokens}", texts, tokenizer, lambda: pack_pairs(pairs, tokenizer, tokens))


def _read(source: Path, target: Path) -> list[Pair]:
    left, right = lines_in(source), lines_in(target)
    if len(left) != len(right):
        longer, shorter = (source, target) if len(left) > len(right) else (target, source)
        line = min(len(left), len(right)) + 1
        raise ValueError(
            f"'{source}' has {len(left)} lines and '{target}' {len(right)}: line {line} of "
            f"'{longer.name}' has no translation in '{shorter.name}'"
        )
    pairs = zip(map(_plain, left), map(_plain, right), strict=True)
    return [(a, b) for a, b in pairs if a and b]


def _plain(line: str) -> str:
    return " ".join(line.split())


def _split(pairs: Pairs, one_in: int = 10, limit: int = 2000) -> Parallel:
    """Holds out one pair in `one_in`, but about `limit` at most: those with the smallest hashes."""
    if not pairs:
        return Parallel((), ())
    hashes = [hashlib.sha256(source.encode()).digest() for source, _ in pairs]
    count = max(1, min(limit, len(pairs) // one_in))
    bound = sorted(hashes)[count - 1]
    train: list[Pair] = []
    held_out: list[Pair] = []
    for key, pair in zip(hashes, pairs, strict=True):
        # A sentence with several translations has one hash, so all of them are on the same side.
        (held_out if key <= bound else train).append(pair)
    return Parallel(tuple(train), tuple(held_out))
