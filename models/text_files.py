"""Texts in files: plain, or the field `text` of the lines of a .jsonl file or of the rows of a .parquet file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jvpipe.ir.extras import extra

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")
"""Of the files that a folder is searched for; a plain text may have any other."""
_FIELD = "text"


def texts_in(file: Path) -> list[str]:
    """The texts of a file, in their order.

    Raises:
        ValueError: it cannot be read, or has no texts.
        MissingExtraError: it is a .parquet file, and pyarrow is not installed.
    """
    match file.suffix.lower():
        case ".jsonl":
            return list(_of_lines(file))
        case ".parquet":
            return _of_rows(file)
        case _:
            return [read_text(file)]


def read_text(file: Path) -> str:
    """A plain text; ValueError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{file}' is not UTF-8 text (byte {error.start}): convert it, e.g. with iconv -t utf-8, or leave it out"
        ) from error
    except OSError as error:
        raise ValueError(
            f"cannot read '{file}' ({error.strerror}): check that it may be read"
        ) from error


def _of_lines(file: Path) -> Iterator[str]:
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as problem:
            raise ValueError(
                f"line {number} of '{file}' is no JSON ({problem}): each line is to be an object"
            ) from None
        if not isinstance(told, dict) or not isinstance(told.get(_FIELD), str):
            raise ValueError(
                f"line {number} of '{file}' {_lacks(list(told) if isinstance(told, dict) else [])}"
            )
        yield told[_FIELD]


def _of_rows(file: Path) -> list[str]:
    with extra("parquet"):
        from pyarrow import ArrowException, parquet
    try:
        names = parquet.read_schema(file).names
        if _FIELD not in names:
            raise ValueError(f"'{file}' {_lacks(names)}")
        column: list[Any] = parquet.read_table(file, columns=[_FIELD]).column(_FIELD).to_pylist()
    except (ArrowException, OSError) as problem:
        raise ValueError(f"cannot read '{file}' ({str(problem).splitlines()[0]})") from problem
    if other := [value for value in column if not isinstance(value, str | None)]:
        raise ValueError(f"'{file}' {_lacks(names)}: there is {type(other[0]).__name__}")
    return [value for value in column if value is not None]


def _lacks(names: list[str]) -> str:
    return f"has no text in a field '{_FIELD}'" + (
        f", its fields are {', '.join(map(str, names))}" if names else ""
    )
