"""Reads texts and conversations from files.

A file either is one plain text, or has a text or a conversation in each line (.jsonl) or row
(.parquet).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jvpipe.util.brief import first_line
from jvpipe.util.extras import extra

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")
"""The suffixes of the files that are read in a folder. A single file may have any suffix."""
TEXT, MESSAGES = "text", "messages"
"""The fields of a line or row that hold a text and a conversation."""


def texts_in(file: Path) -> list[str]:
    """Returns the texts of a file in order.

    Raises:
        ValueError: the file cannot be read, or a line or the rows have no text.
        MissingExtraError: it is a .parquet file, and pyarrow is not installed.
    """
    match file.suffix.lower():
        case ".jsonl":
            return list(_of_lines(file, TEXT, str))
        case ".parquet":
            return _of_rows(file, TEXT, str)
        case _:
            return [read_text(file)]


def conversations_in(file: Path) -> list[list[Any]]:
    """Returns the conversations of a file as lists of messages.

    Raises:
        ValueError: the file cannot be read, or a line or the rows have no conversation.
        MissingExtraError: it is a .parquet file, and pyarrow is not installed.
    """
    of = _of_rows if file.suffix.lower() == ".parquet" else _of_lines
    return list(of(file, MESSAGES, list))


def holds_conversations(file: Path) -> bool:
    """Tells whether the first line (.jsonl) or rows (.parquet) have `messages` and no `text`."""
    match file.suffix.lower():
        case ".jsonl":
            lines = (line for line in lines_in(file) if line.strip())
            first = next(lines, "")
            try:
                fields = json.loads(first)
            except (ValueError, RecursionError):
                return False
        case ".parquet":
            with extra("parquet"):
                from pyarrow import ArrowException, parquet
            try:
                fields = parquet.read_schema(file).names
            except (ArrowException, OSError):
                return False
        case _:
            return False
    return isinstance(fields, dict | list) and MESSAGES in fields and TEXT not in fields


def lines_in(file: Path) -> list[str]:
    """Returns the lines of a text, each of which ends at a line feed or at the end of the text.

    Other characters that may end lines, such as a lone carriage return, are a part of a line.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    lines = _read(file).removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def read_text(file: Path) -> str:
    """Reads a plain text, in which all ends of lines become line feeds.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    return _read(file).replace("\r\n", "\n").replace("\r", "\n")


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{file}' is not UTF-8 text (byte {error.start}): convert it, e.g. with iconv -t "
            "utf-8, or remove it"
        ) from error
    except OSError as error:
        raise ValueError(
            f"cannot read '{file}' ({error.strerror}): check its path and permissions"
        ) from error


def _of_lines(file: Path, field: str, kind: type[Any]) -> Iterator[Any]:
    # `splitlines` would also split at U+2028 and others, which JSON texts may hold unescaped.
    for number, line in enumerate(lines_in(file), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # only an escape can be half a surrogate pair
                json.dumps(record, ensure_ascii=False).encode()  # which cannot be encoded
        except (ValueError, RecursionError) as problem:
            raise ValueError(
                f"line {number} of '{file}' is not JSON in UTF-8 ({problem}): each line must be "
                "an object"
            ) from None
        fields = record if isinstance(record, dict) else {}
        if not isinstance(fields.get(field), kind):
            raise ValueError(f"line {number} of '{file}' {lacks(field, list(fields))}")
        yield fields[field]


def _of_rows(file: Path, field: str, kind: type[Any]) -> list[Any]:
    with extra("parquet"):
        from pyarrow import ArrowException, parquet
    try:
        names = parquet.read_schema(file).names
        if field not in names:
            raise ValueError(f"'{file}' {lacks(field, names)}")
        table: Any = parquet.read_table(file, columns=[field])
        column: list[Any] = table.column(field).to_pylist()
    except (ArrowException, OSError) as problem:
        raise ValueError(
            f"cannot read '{file}' ({first_line(problem)}): write it again"
        ) from problem
    if other := [value for value in column if not isinstance(value, kind | None)]:
        kind_found = type(other[0]).__name__
        raise ValueError(f"'{file}' {lacks(field, names)}: it holds {kind_found}")
    return [value for value in column if value is not None]


def lacks(field: str, names: list[str]) -> str:
    """Returns the part of a message that says which field is missing and which fields exist."""
    what = "text" if field == TEXT else "list"
    present = f", its fields are {', '.join(map(str, names))}" if names else ""
    return f"has no {what} in a field '{field}'{present}"
