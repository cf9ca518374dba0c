"""Checks data from a JSON file against a pattern, which has the structure of the data.

    pattern                matches
    str, bool              a value of exactly that type
    [p]                    a list of any length whose elements all match p
    (p, q)                 a list of two elements; the first matches p, the second q
    {str: p}               a mapping with any names whose values all match p
    {"a": p, "b?": q}      a mapping with the name a, whose value matches p, and optionally with the
                           name b, whose value matches q; it has no other names
    f                      data for which the function f does not raise ValueError; it is called
                           as f(where, data), where `where` is the path of the data in the file

Here p and q are patterns, so patterns can be nested as deeply as the data are.
"""

from typing import Any

from jvpipe.util.brief import brief

Pattern = Any
LARGEST = 2**63 - 1
"""The largest whole number that `whole_in` accepts unless it is given another limit."""
_DEEPEST = 200
"""How deeply lists and mappings may be nested. Some readers of JSON fail on deeper data."""


def compare(where: str, data: Any, pattern: Pattern) -> None:
    """Raises ValueError unless data match a pattern; the message names the entry that is wrong.

    Args:
        where: the path of the data in the file, for the message.
        data: numbers, texts, lists and mappings, as JSON has them.
        pattern: a pattern as described at the top of this file.

    >>> compare("step", {"at": [3, "x"]}, {"at": [whole_in()]})
    Traceback (most recent call last):
    ValueError: step.at[1] must be a whole number from 0 to 9223372036854775807, not 'x'
    """
    match pattern:
        case dict():
            _compare_names(where, data, pattern)
        case list():
            _need(isinstance(data, list), where, "a list", data)
            for i, element in enumerate(data):
                compare(f"{where}[{i}]", element, pattern[0])
        case tuple():
            size = len(pattern)
            fits = isinstance(data, list) and len(data) == size
            _need(fits, where, f"a list of {size}", data)
            pairs = zip(data, pattern, strict=True)
            for i, (element, element_pattern) in enumerate(pairs):
                compare(f"{where}[{i}]", element, element_pattern)
        case type():
            _need(type(data) is pattern, where, _TYPES[pattern], data)
        case _:
            pattern(where, data)


_TYPES = {str: "a text", bool: "true or false"}


def _compare_names(where: str, data: Any, pattern: dict[Any, Pattern]) -> None:
    """Compares a mapping with the pattern of a mapping, name by name."""
    _need(isinstance(data, dict), where, "a mapping of names", data)
    if str in pattern:
        for name, value in data.items():
            compare(f"{where}[{name!r}]", value, pattern[str])
        return
    needed = [name for name in pattern if not name.endswith("?")]
    missing = [name for name in needed if name not in data]
    if missing:
        raise ValueError(f"{where} lacks {missing[0]}")
    patterns = {name.removesuffix("?"): value for name, value in pattern.items()}
    unknown = [name for name in data if name not in patterns]
    if unknown:
        raise ValueError(f"{where} has an unknown entry, {brief(unknown[0])}")
    for name, value in data.items():
        compare(f"{where}.{name}", value, patterns[name])


def whole_in(least: int = 0, largest: int = LARGEST) -> Pattern:
    """Returns the pattern of whole numbers in a range, both ends included."""

    def check(where: str, data: Any) -> None:
        # `isinstance` is not used, because in Python True is an instance of int.
        fits = type(data) is int and least <= data <= largest
        expected = f"a whole number from {least} to {largest}"
        _need(fits, where, expected, data)

    return check


def number(where: str, data: Any) -> None:
    """Matches any number; true and false do not count as numbers."""
    _need(type(data) in (int, float), where, "a number", data)


def anything(where: str, data: Any, depth: int = 0) -> None:
    """Matches all that JSON can hold, unless lists or mappings are nested too deeply.

    Args:
        where: the path of the data in the file, for the message.
        data: the data.
        depth: how many lists and mappings enclose the data.
    """
    # The limit also keeps this recursion well below Python's recursion limit.
    if depth > _DEEPEST:
        raise ValueError(f"{where} has lists or mappings nested more than {_DEEPEST} deep")
    if isinstance(data, list | dict):
        elements = data.values() if isinstance(data, dict) else data
        for element in elements:
            anything(where, element, depth + 1)


def maybe(pattern: Pattern) -> Pattern:
    """Returns a pattern that matches null, and whatever the given pattern matches."""

    def check(where: str, data: Any) -> None:
        if data is not None:
            compare(where, data, pattern)

    return check


def one_of_texts(values: Any) -> Pattern:
    """Returns a pattern that matches only the given texts."""
    texts = list(map(str, values))

    def check(where: str, data: Any) -> None:
        fits = isinstance(data, str) and data in texts
        listed = ", ".join(texts)
        _need(fits, where, f"one of {listed}", data)

    return check


def _need(fits: bool, where: str, expected: str, data: Any) -> None:
    """Raises ValueError unless `fits`; the message says what was expected."""
    if not fits:
        raise ValueError(f"{where} must be {expected}, not {brief(data)}")
