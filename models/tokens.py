"""From text to token ids: byte-pair encoding (arXiv:1508.07909) over UTF-8 bytes, and packed records."""

import hashlib
import io
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jvpipe.models.corpus import cache_folder, write_whole

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))


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


def open_tokenizer(folder: Path, documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """The tokenizer in `folder/tokenizer.json`; trained on `documents` and written there if absent.

    Raises:
        ValueError: the file is no tokenizer of ours, or has more tokens than the model.

    """
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, train_tokenizer(documents, vocabulary).to_str(pretty=True).encode())
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"'{path}' is not a tokenizer ({error}): delete it, and it is trained again") from error
    if [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        raise ValueError(f"'{path}' does not begin with {' '.join(SPECIAL_TOKENS)}: it belongs to another model")
    if tokenizer.get_vocab_size() > vocabulary:
        raise ValueError(
            f"'{path}' has {tokenizer.get_vocab_size()} tokens, the model {vocabulary}: use the size that the run "
            "began with, or another run directory"
        )
    return tokenizer


def pack(documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "N T"]:
    """Records of T ids without padding: [CLS], then text, [SEP] after each document; a rest is dropped."""
    stream: list[np.ndarray] = []
    remaining = iter(documents)
    while chunk := list(islice(remaining, 256)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            stream.append(np.array([*encoding.ids, SEP], np.int32))
    ids = np.concatenate(stream) if stream else np.zeros(0, np.int32)
    rows = ids[: len(ids) // (tokens - 1) * (tokens - 1)].reshape(-1, tokens - 1)
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=CLS)


def cached_records(documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "N T"]:
    """`pack`, once: then read from the cache, under the hash of documents and tokenizer, as a memory map."""
    key = hashlib.sha256(tokenizer.to_str().encode())
    for document in documents:
        key.update(hashlib.sha256(document.encode()).digest())
    path = cache_folder() / f"records-{key.hexdigest()[:32]}-{tokens}.npy"
    if not path.exists():
        content = io.BytesIO()
        np.save(content, pack(documents, tokenizer, tokens), allow_pickle=False)
        write_whole(path, content.getvalue())
    return np.load(path, mmap_mode="r", allow_pickle=False)
