"""Documents to train on: texts or conversations, read from files or streamed from the hub."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.corpus import Corpus, files_under, open_corpus
from jvpipe.models.hub import data_set, is_name
from jvpipe.models.streams import PackedTexts, Rows, read_head
from jvpipe.models.text_files import (
    MESSAGES,
    TEXT,
    conversations_in,
    holds_conversations,
    lacks,
)
from jvpipe.models.tokens import pack


@dataclass(frozen=True)
class Documents:
    """Documents as strings. A conversation is a string of JSON.

    Attributes:
        first: the documents to train on; if there is a stream, the documents at its beginning.
        held_out: documents that are never trained on.
        digest: a SHA-256 digest of `first` and `held_out`.
        stream: a stream of all documents to train on; None if `first` has all of them.
    """

    first: Sequence[str]
    held_out: Sequence[str]
    digest: str
    stream: grain.IterDataset | None = None


@runtime_checkable
class Form(Protocol):
    """A way to turn documents into records, which are arrays whose last axis counts tokens."""

    @property
    def field(self) -> str:
        """The field of a row or line that holds its document."""
        ...

    @property
    def name(self) -> str:
        """The name of this form in the cache, which keeps the records of each form separately."""
        ...

    def records(self, documents: Sequence[str], tokenizer: Tokenizer, tokens: int) -> np.ndarray:
        """Makes the records of documents in memory. The first axis counts records."""
        ...

    def streamed(
        self, documents: grain.IterDataset, tokenizer: Tokenizer, tokens: int
    ) -> grain.IterDataset:
        """Makes the records of a stream of documents."""
        ...


@dataclass(frozen=True)
class Packed:
    """Texts one after another, split wherever a record is full."""

    field = TEXT
    name = "packed"

    def records(
        self, documents: Sequence[str], tokenizer: Tokenizer, tokens: int
    ) -> Int32[np.ndarray, "N T"]:
        """Makes records as `tokens.pack` does."""
        return pack(documents, tokenizer, tokens)

    def streamed(
        self, documents: grain.IterDataset, tokenizer: Tokenizer, tokens: int
    ) -> grain.IterDataset:
        """Makes the records of a stream of texts."""
        return PackedTexts(documents, tokenizer, tokens)


PACKED = Packed()
"""The form of all texts that are not conversations."""


def open_documents(path: Path | None, field: str = TEXT) -> Documents:
    """Opens texts or conversations of a path or of the hub; for None, the prose of Python.

    Args:
        path: a file or folder, or else the name of a data set on the hub, `owner/name`, which is
            streamed.
        field: `text`, or `messages` for conversations.

    Raises:
        ValueError: as in `open_corpus` and `data_set`; or there are too few conversations.
    """
    if path is not None and is_name(path):
        return _streamed(path, field)
    corpus = open_corpus(path) if field == TEXT or path is None else _conversations(path)
    documents, held_out = corpus.split()
    return Documents(documents, held_out, corpus.digest)


def are_conversations(path: Path | None) -> bool:
    """Tells from the first file or row whether data has `messages` and no `text`."""
    if path is None:
        return False
    if is_name(path):
        first = next(iter(data_set(path)()), {})
        return MESSAGES in first and TEXT not in first
    return path.exists() and holds_conversations(files_under(path)[0])


def _conversations(path: Path) -> Corpus:
    conversations = [
        conversation for file in files_under(path) for conversation in conversations_in(file)
    ]
    if len(conversations) < 2:
        raise ValueError(
            f"'{path}' has {len(conversations)} conversations: give at least two, because some are "
            "held out"
        )
    return Corpus(tuple(map(json.dumps, conversations)))


def _streamed(name: Path, field: str) -> Documents:
    def document(row: Any) -> str:
        value = row.get(field)
        if field == TEXT and isinstance(value, str):
            return value
        if field == MESSAGES and isinstance(value, list):
            return json.dumps(value)
        raise ValueError(f"'{name}' {lacks(field, list(row))}")

    rows = data_set(name)
    head = read_head(rows, str(name))
    held_out = list(map(document, head.held_out))
    first = list(map(document, head.first))
    # The stream starts right after the held-out rows, so it yields `first` again.
    stream = Rows(rows, len(held_out)).map(document)
    return Documents(first, held_out, head.digest, stream)
