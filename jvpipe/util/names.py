"""Suggests existing names in place of a name that does not exist; finds names given twice."""

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jvpipe.util.brief import brief


def did_you_mean(kind: str, name: Any, names: Sequence[str]) -> str:
    """Writes the message for an unknown name.

    Args:
        kind: the kind of thing that the name stands for, such as "schedule".
        name: the unknown name, or what the user gave in place of a name.
        names: all names that exist.

    >>> did_you_mean("schedule", "1f1p", ["gpipe", "1f1b"])
    "unknown schedule '1f1p': did you mean '1f1b'? There are gpipe, 1f1b"
    >>> did_you_mean("tensor", "*", [])
    "unknown tensor '*': There are none"
    """
    guess = ""
    if isinstance(name, str) and (close := difflib.get_close_matches(name, names, n=1)):
        guess = f"did you mean '{close[0]}'? "
    listed = ", ".join(names) or "none"
    return f"unknown {kind} {brief(name)}: {guess}There are {listed}"


def repeated(names: Iterable[str]) -> str | None:
    """Returns the first name that is there more than once; None if there is none.

    >>> repeated(["b", "a", "a", "b"]), repeated(["a", "b"])
    ('b', None)
    """
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Finds the four names that are most similar to a name or a pattern, the most similar first.

    >>> names = ["embed/dot_0", "blocks/0/mlp/dot_0", "blocks/0/attention/dot_0"]
    >>> nearest("*/atention/*", names)[0]
    'blocks/0/attention/dot_0'
    """
    # The matcher analyzes its second sequence, `b`, only once. So `b` is the name that all
    # others are compared with.
    matcher = difflib.SequenceMatcher(b=name)

    def unlikeness(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    distinct = dict.fromkeys(names)
    return sorted(distinct, key=unlikeness)[:4]
