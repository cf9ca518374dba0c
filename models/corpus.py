"""A corpus of plain-text documents, with a digest and a split into training and held-out parts."""

import hashlib
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jvpipe.models.text_files import SUFFIXES, read_text, texts_in


@dataclass(frozen=True)
class Corpus:
    """Documents with one paragraph per line; each has a few paragraphs of one file."""

    documents: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole corpus, with a blank line between documents."""
        return "\n\n".join(self.documents)

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def split(self, one_in: int = 50) -> tuple[list[str], list[str]]:
        """Splits documents into those to train on and those to hold out.

        One document in `one_in` is held out, but at least one.

        >>> train, held_out = Corpus(tuple(f"Document {i}." for i in range(100))).split()
        >>> len(train), len(held_out)
        (98, 2)
        """
        # The documents with the smallest hashes are held out, so the split depends neither on a
        # seed nor on the order of the documents.
        hashes = [hashlib.sha256(document.encode()).digest() for document in self.documents]
        by_hash = sorted(range(len(hashes)), key=hashes.__getitem__)
        chosen = set(by_hash[: max(1, len(hashes) // one_in)])
        train = [document for i, document in enumerate(self.documents) if i not in chosen]
        return train, [self.documents[i] for i in sorted(chosen)]


def documents(paragraphs: Iterable[str], least: int = 2000) -> list[str]:
    """Groups the paragraphs of one file into documents of at least `least` characters.

    The last document may be shorter.
    """
    whole, group, characters = [], [], 0
    for paragraph in paragraphs:
        group.append(paragraph)
        characters += len(paragraph)
        if characters >= least:
            whole.append("\n".join(group))
            group, characters = [], 0
    return whole + (["\n".join(group)] if group else [])


def open_corpus(path: Path | None) -> Corpus:
    """Opens the text under `path`; if None, the English prose of the running Python installation.

    In a folder, all `.txt`, `.md`, `.rst`, `.jsonl` and `.parquet` files are read, in the order of
    their paths. Each line (`.jsonl`) or row (`.parquet`) must have a field `text`.

    Raises:
        ValueError: the path does not exist, a file cannot be read or is not UTF-8, or there is too
            little text.
    """
    if path is None:
        return _python_prose()
    texts = [text for file in files_under(path) for text in texts_in(file)]
    parts = [document for text in texts for document in documents(_paragraphs(text))]
    if len(parts) < 2:
        # A text without blank lines is one paragraph and thus one document. To split it, it is
        # wrapped into lines of 200 characters, which serve as paragraphs.
        wrapped = [documents(textwrap.wrap(text, 200)) for text in texts]
        parts = [document for some in wrapped for document in some]
    if len(parts) < 2:
        characters = sum(map(len, parts))
        raise ValueError(
            f"'{path}' holds {characters} characters of text: give at least a few thousand, "
            "because some are held out"
        )
    return Corpus(tuple(parts))


def cache_folder() -> Path:
    """Returns the cache folder, `jvpipe` in XDG_CACHE_HOME or ~/.cache, and makes it if absent."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches) / "jvpipe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the cache folder '{folder}' ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that no reader ever sees an incomplete file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)  # atomic within one file system; the last of several writers wins


def _python_prose() -> Corpus:
    """Gathers Python's prose once, so that packages installed later do not change a run's data."""
    path = cache_folder() / "python-prose.txt"
    if not path.exists():
        from jvpipe.models.prose import gather_prose

        write_whole(path, gather_prose().text.encode())
    return Corpus(tuple(read_text(path).split("\n\n")))


def files_under(path: Path) -> list[Path]:
    """Returns the text files in a folder and below, sorted by path; for a file, only this file.

    Raises:
        ValueError: the path does not exist, or has no text files.
    """
    if not path.exists():
        raise ValueError(
            f"there is no '{path}': give an existing text file or a folder of text files"
        )
    if path.is_file():
        return [path]
    named = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
    files = sorted(file for file in named if file.is_file())
    if not files:
        raise ValueError(
            f"there is no {', '.join(SUFFIXES)} file in '{path}' or below: add some, or give the "
            "path of a file with another suffix"
        )
    return files


def _paragraphs(text: str) -> Iterable[str]:
    """Yields runs of lines without a blank line between them, each joined to one line."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:  # the last blank line ends the last paragraph
        if words := line.split():
            lines += words
        elif lines:
            yield " ".join(lines)
            lines = []
