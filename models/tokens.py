"""From text to token ids: byte-pair encoding (arXiv:1508.07909) over UTF-8 bytes, and packed records."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jvpipe.models.corpus import cache_folder, write_whole

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
_STARTS = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>", "<pad>")
_ENDS = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
_MASKS = ("[MASK]", "<mask>")
"""Texts of the tokens that mark a record's start, a document's end and a hidden token, in order of preference."""


@dataclass(frozen=True)
class Marks:
    """The ids of a tokenizer that stand for no text: `start`, `end`, `mask` (None: it has none), and all of them."""

    start: int
    end: int
    mask: int | None
    special: tuple[int, ...]

    @property
    def first(self) -> int:
        """The id behind the special ids if these come first; else 0, because text may have any id."""
        alone = self.special == tuple(range(len(self.special)))
        return len(self.special) if alone else 0


OURS = Marks(CLS, SEP, MASK, tuple(range(len(SPECIAL_TOKENS))))
"""The marks of the tokenizers that are trained here."""


def marks_of(tokenizer: Tokenizer) -> Marks:
    """The special ids of a tokenizer, ours or another.

    Raises:
        ValueError: it has nothing to end a document with.
    """

    def first_known(names: Sequence[str]) -> int | None:
        ids = (tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    start, end, mask = (first_known(names) for names in (_STARTS, _ENDS, _MASKS))
    if end is None:
        raise ValueError(
            f"the tokenizer knows none of {', '.join(_ENDS)}, one of which ends a document: add one to it"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    special |= {i for i in (start, end, mask) if i is not None}
    # GPT-2's tokenizers have one mark for both: what ends a document then starts a record.
    start = end if start is None else start
    return Marks(start, end, mask, tuple(sorted(special)))


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of lower-case text with at most `vocabulary` tokens: special ones, the 256 bytes, merges.

    The same documents give the same tokenizer, which WordPiece, in this library, does not.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a file, as the tokenizers package writes it, without padding or truncation.

    Raises:
        ValueError: it is none.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"'{path}' is not a tokenizer ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def open_tokenizer(folder: Path, documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """The tokenizer in `folder/tokenizer.json`; trained on `documents` and written there if absent.

    Raises:
        ValueError: the file is not a tokenizer, or has more tokens than the model.

    """
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, train_tokenizer(documents, vocabulary).to_str(pretty=True).encode())
    try:
        tokenizer = read_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"{error}: delete it, and it is trained again") from error
    size = tokenizer.get_vocab_size()
    # Fewer are fine: the model's table then has rows that are never read.
    if size > vocabulary:
        raise ValueError(
            f"the tokenizer has {size} tokens, the model {vocabulary}: use the size that the run began with, or begin "
            f"one with --set vocabulary={size}"
        )
    return tokenizer


def pack(documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "N T"]:
    """Records of T ids without padding: a start, then text, an end after each document; a rest is dropped."""
    marks = marks_of(tokenizer)
    stream: list[np.ndarray] = []
    remaining = iter(documents)
    # In chunks: encodings are many times as large as their ids, and are let go after each.
    while chunk := list(islice(remaining, 256)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            stream.append(np.array([*encoding.ids, marks.end], np.int32))
    ids = np.concatenate(stream) if stream else np.zeros(0, np.int32)
    width = tokens - 1  # a start mark stands before each row
    whole = len(ids) // width * width
    rows = ids[:whole].reshape(-1, width)
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=marks.start)


def cached(
    name: str, texts: Sequence[str], tokenizer: Tokenizer, rows: Callable[[], np.ndarray]
) -> Int32[np.ndarray, "N ..."]:
    """`rows()`, once: then read from the cache, under the hash of texts and tokenizer, as a memory map."""
    key = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        # A digest of each, so that texts cut elsewhere do not give the same bytes.
        digest = hashlib.sha256(text.encode()).digest()
        key.update(digest)
    path = cache_folder() / f"records-{key.hexdigest()[:32]}-{name}.npy"
    if not path.exists():
        content = io.BytesIO()
        np.save(content, rows(), allow_pickle=False)
        write_whole(path, content.getvalue())
    return np.load(path, mmap_mode="r", allow_pickle=False)
