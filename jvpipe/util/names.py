"""Names that a user gave and that we do not know."""

import difflib
from collections.abc import Sequence

from jvpipe.util.brief import brief

_LONG = 100


def did_you_mean(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for an unknown name.

    Args:
        kind: of thing that is named.
        name: that nobody knows.
        known: the names that there are.

    >>> did_you_mean("schedule", "1f1p", ["gpipe", "1f1b"])
    "unknown schedule '1f1p': did you mean '1f1b'? There are gpipe, 1f1b"
    >>> did_you_mean("tensor", "*", [])
    "unknown tensor '*': There are none"
    """
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    told = f"'{name}'" if len(name) < _LONG else brief(name)
    return f"unknown {kind} {told}: {guess}There are {', '.join(known) or 'none'}"


def nearest(name: str, known: Sequence[str], most: int = 4) -> list[str]:
    """The known names that a name or a pattern is most like, the closest first.

    >>> nearest("*/atention/*", ["embed/dot_0", "blocks/0/mlp/dot_0", "blocks/0/attention/dot_0"], most=1)
    ['blocks/0/attention/dot_0']
    """
    matcher = difflib.SequenceMatcher(b=name)

    def unlike(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    return sorted(dict.fromkeys(known), key=unlike)[:most]
