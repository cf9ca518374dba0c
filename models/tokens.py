"""Tokenizers (byte-pair encoding of UTF-8, arXiv:1508.07909), and packed records of ids."""

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
"""Tokens that may mark the start of a record, the end of a document, or a hidden token, in order of
preference.
"""


@dataclass(frozen=True)
class Marks:
    """The special ids of a tokenizer, which do not represent text.

    Attributes:
        start: the id that begins a record.
        end: the id that ends a document.
        mask: the id that stands for a hidden token; None if the tokenizer has no such token.
        special: all special ids.
    """

    start: int
    end: int
    mask: int | None
    special: tuple[int, ...]

    @property
    def first(self) -> int:
        """The least id of ordinary text if the special ids are 0, 1, 2 and so on; else 0."""
        alone = self.special == tuple(range(len(self.special)))
        return len(self.special) if alone else 0


OURS = Marks(CLS, SEP, MASK, tuple(range(len(SPECIAL_TOKENS))))
"""The marks of the tokenizers that `train_tokenizer` makes."""


def marks_of(tokenizer: Tokenizer) -> Marks:
    """Finds the special ids of any tokenizer, including those that jvpipe did not train.

    Raises:
        ValueError: the tokenizer has no token that ends a document.
    """

    def first_known(names: Sequence[str]) -> int | None:
        ids = (tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    start, end, mask = (first_known(names) for names in (_STARTS, _ENDS, _MASKS))
    if end is None:
        raise ValueError(
            f"the tokenizer has none of the tokens {', '.join(_ENDS)}, one of which must end a "
            "document: add one of them to it"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    special |= {i for i in (start, end, mask) if i is not None}
    # A tokenizer may have no start mark. Then the end mark starts a record, too.
    start = end if start is None else start
    return Marks(start, end, mask, tuple(sorted(special)))


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Trains a tokenizer of lower-case text. Its ids are special tokens, 256 bytes, then merges.

    It has at most max(260, `vocabulary`) tokens. The same documents always give the same tokenizer.
    The WordPiece trainer of the tokenizers package does not guarantee this.
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
    """Reads a tokenizer that the tokenizers package saved; turns off padding and truncation.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"'{path}' is not a tokenizer ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def open_tokenizer(folder: Path, documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Opens `folder/tokenizer.json`; if it is missing, trains it on `documents` and writes it.

    Raises:
        ValueError: the file is not a tokenizer, or the tokenizer has more tokens than the model.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, train_tokenizer(documents, vocabulary).to_str(pretty=True).encode())
    try:
        tokenizer = read_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"{error}: delete the file to train a new tokenizer") from error
    size = tokenizer.get_vocab_size()
    # With fewer tokens, some rows of the model's table are never used, which does no harm.
    if size > vocabulary:
        raise ValueError(
            f"the tokenizer has {size} tokens, but the model has {vocabulary}: use the model size "
            f"with which the run began, or begin a run with --set vocabulary={size}"
        )
    return tokenizer


def pack(documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "N T"]:
    """Packs documents into records of T ids without padding.

    A record is a start mark, then text with an end mark after each document. The text at the end is
    dropped if it does not fill a record.
    """
    marks = marks_of(tokenizer)
    stream: list[np.ndarray] = []
    remaining = iter(documents)
    # An encoding is many times as large as its ids, so only some encodings exist at a time.
    while chunk := list(islice(remaining, 256)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            stream.append(np.array([*encoding.ids, marks.end], np.int32))
    ids = np.concatenate(stream) if stream else np.zeros(0, np.int32)
    width = tokens - 1  # each row also gets a start mark
    whole = len(ids) // width * width
    rows = ids[:whole].reshape(-1, width)
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=marks.start)


def cached(
    name: str, texts: Sequence[str], tokenizer: Tokenizer, rows: Callable[[], np.ndarray]
) -> Int32[np.ndarray, "N ..."]:
    """Returns the result of `rows()`, computed once and then memory-mapped from the cache folder.

    The key consists of `name` and of a hash of the texts and the tokenizer.
    """
    key = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        # The key hashes each text's digest, not the text itself. Otherwise, two splits of the same
        # text into documents would share a key.
        digest = hashlib.sha256(text.encode()).digest()
        key.update(digest)
    path = cache_folder() / f"records-{key.hexdigest()[:32]}-{name}.npy"
    if not path.exists():
        content = io.BytesIO()
        np.save(content, rows(), allow_pickle=False)
        write_whole(path, content.getvalue())
    return np.load(path, mmap_mode="r", allow_pickle=False)
