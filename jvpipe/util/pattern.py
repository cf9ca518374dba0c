"""Plain data from a file, compared with what it should be, entry by entry.

A pattern is `str` or `bool` for such a value, `[p]` for a list of any length, `(p, q)` for a list of just these,
`{str: p}` for a mapping of any names, `{"a": p, "b?": q}` for one of these names, of which b may be missing, or a
function that raises ValueError itself, such as those below.
"""

from collections.abc import Callable
from typing import Any

from jvpipe.util.brief import brief

Pattern = Any
MOST = 2**63 - 1
"""Of a whole number, unless a pattern says otherwise."""
_DEEPEST = 200


def compare(where: str, data: Any, pattern: Pattern) -> None:
    """Raises ValueError unless data are as a pattern says; the message names the entry.

    Args:
        where: the data are.
        data: as JSON has them.
        pattern: as told above.

    >>> compare("step", {"at": [3, "x"]}, {"at": [whole()]})
    Traceback (most recent call last):
    ValueError: step.at[1] must be a whole number from 0 to 9223372036854775807, not 'x'
    """
    match pattern:
        case dict():
            _compare_names(where, data, pattern)
        case list():
            _need(isinstance(data, list), where, "a list", data)
            for i, each in enumerate(data):
                compare(f"{where}[{i}]", each, pattern[0])
        case tuple():
            told = f"a list of {len(pattern)}"
            _need(isinstance(data, list) and len(data) == len(pattern), where, told, data)
            for i, (each, wanted) in enumerate(zip(data, pattern, strict=True)):
                compare(f"{where}[{i}]", each, wanted)
        case type():
            _need(type(data) is pattern, where, _WORDS[pattern], data)
        case _:
            pattern(where, data)


_WORDS = {str: "a text", bool: "true or false"}


def _compare_names(where: str, data: Any, pattern: dict[Any, Pattern]) -> None:
    _need(isinstance(data, dict), where, "a mapping of names", data)
    if str in pattern:
        for name, value in data.items():
            compare(f"{where}[{name!r}]", value, pattern[str])
        return
    wanted = {name.removesuffix("?"): value for name, value in pattern.items()}
    if missing := [name for name in pattern if not name.endswith("?") and name not in data]:
        raise ValueError(f"{where} lacks {missing[0]}")
    if unknown := [name for name in data if name not in wanted]:
        raise ValueError(f"{where} has an entry that is not known, {brief(unknown[0])}")
    for name, value in data.items():
        compare(f"{where}.{name}", value, wanted[name])


def whole(least: int = 0, most: int = MOST) -> Pattern:
    """A whole number between two."""

    def check(where: str, data: Any) -> None:
        fits = type(data) is int and least <= data <= most
        _need(fits, where, f"a whole number from {least} to {most}", data)

    return check


def number(where: str, data: Any) -> None:
    """A number of any kind."""
    _need(type(data) in (int, float), where, "a number", data)


def anything(where: str, data: Any) -> None:
    """What JSON holds, no deeper than is read everywhere."""
    level, deep = [data], 0
    while level:
        if deep > _DEEPEST:
            raise ValueError(f"{where} holds lists or mappings more than {_DEEPEST} deep")
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        nested = [each for each in inside if not isinstance(each, str | int | float | None)]
        level, deep = [part for each in nested for part in each], deep + 1


def maybe(pattern: Pattern) -> Pattern:
    """What a pattern says, or null."""

    def check(where: str, data: Any) -> None:
        if data is not None:
            compare(where, data, pattern)

    return check


def one_of(values: Any) -> Pattern:
    """One of some texts."""
    known = list(map(str, values))

    def check(where: str, data: Any) -> None:
        _need(isinstance(data, str) and data in known, where, f"one of {', '.join(known)}", data)

    return check


def either(test: Callable[[Any], bool], then: Pattern, other: Pattern) -> Pattern:
    """One pattern for data that pass a test, another one for what does not."""

    def check(where: str, data: Any) -> None:
        compare(where, data, then if test(data) else other)

    return check


def _need(holds: bool, where: str, wanted: str, data: Any) -> None:
    if not holds:
        raise ValueError(f"{where} must be {wanted}, not {brief(data)}")
