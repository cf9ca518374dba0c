"""Parses JSON into objects with the line where they start, so that errors can name the line.

Python's parser does not report lines, but it makes the objects in the order in which they close. A
search for braces outside of strings finds the objects in the same order, with the line of each.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from jvpipe.profiles.graph_parts import flaw, wrong
from jvpipe.util.brief import brief
from jvpipe.util.names import repeated

# A string, a brace or the end of a line. A brace inside a string is a part of the string.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\n]')


class Located(dict[str, Any]):
    r"""A JSON object that starts on `line` of `file`; lines count from 1.

    Each method that reads a field raises ValueError if the field is missing or wrong. The message
    names the file and the line.

    >>> whole = parse_located('{"size": 8,\n "nodes": [{"id": 1.5}]}', "a.json")
    >>> whole.amount("size"), whole.objects("nodes")[0].line
    (8.0, 2)
    >>> whole.objects("nodes")[0].count("id")
    Traceback (most recent call last):
    ValueError: a.json, line 2: the field id is 1.5: it must be a whole number
    """

    file: str = ""
    line: int = 1

    def wrong(self, what: str) -> ValueError:
        """Makes an error whose message names the file, and the line where this object starts."""
        return wrong(self.file, self.line, what)

    def field(self, field: str) -> Any:
        """Returns the value of a field, which must exist."""
        if field not in self:
            raise self.wrong(f"the field {field} is missing")
        return self[field]

    def amount(self, field: str) -> float:
        """Reads a number that can be a time or a size: finite, not negative and not huge."""
        number = self.field(field)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self.wrong(f"the field {field} is {number!r}, which is not a number")
        if reason := flaw(number):
            raise self.wrong(f"the field {field} is {brief(number)}: it {reason}")
        return float(number)

    def count(self, field: str) -> int:
        """Reads a whole number that is not negative."""
        number = self.amount(field)
        if not number.is_integer():
            raise self.wrong(f"the field {field} is {number}: it must be a whole number")
        return int(number)

    def flag(self, field: str) -> bool:
        """Reads true or false, which a file may also write as 1 or 0."""
        value = self.field(field)
        if value not in (0, 1):
            raise self.wrong(f"the field {field} is {value!r}: it must be true or false")
        return bool(value)

    def items_of(self, field: str) -> list[Any]:
        """Reads a list."""
        items = self.field(field)
        if not isinstance(items, list):
            raise self.wrong(f"the field {field} is {brief(items)}: it must be a list")
        return items

    def objects(self, field: str) -> list["Located"]:
        """Reads a list of objects."""
        items = self.items_of(field)
        if bad := [item for item in items if not isinstance(item, Located)]:
            raise self.wrong(f"the field {field} holds {bad[0]!r}, which is not an object")
        return items


def parse_located(text: str, file: str) -> Located:
    """Parses a text that holds a JSON object.

    Args:
        text: the text of the file.
        file: the name of the file, for messages.

    Raises:
        ValueError: the text is not JSON, or an object has the same field twice.
    """
    lines = _lines_as_closed(text)

    def locate(pairs: list[tuple[str, Any]]) -> Located:
        located = Located(pairs)
        located.file = file
        located.line = next(lines)
        twice = repeated(name for name, _ in pairs)
        if twice is not None:
            raise located.wrong(f"the field {twice} appears twice: remove one of the two")
        return located

    try:
        whole = json.loads(text, object_pairs_hook=locate, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise wrong(file, error.lineno, f"this is not JSON: {error.msg}") from None
    except RecursionError:
        raise wrong(file, 1, "this JSON is nested too deeply") from None
    if not isinstance(whole, Located):
        raise wrong(file, 1, "the file must hold a JSON object")
    return whole


def _whole(digits: str) -> int | float:
    """Reads a whole number; one with too many digits for `int` is infinite."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _lines_as_closed(text: str) -> Iterator[int]:
    """Yields the lines where objects open, in the order in which the objects close."""
    line = 1
    opened: list[int] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "\n":
            line += 1
        elif token[0] == "{":
            opened.append(line)
        elif token[0] == "}" and opened:
            yield opened.pop()
