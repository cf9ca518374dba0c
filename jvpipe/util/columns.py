"""Small tables of text."""

from collections.abc import Sequence
from itertools import zip_longest


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Rows with their columns under each other; the first row names them.

    >>> print(columns([["stage", "on", "peak"], [0, "cpu:0", "3.00 MiB"], [1, "cpu:1", "12 B"]]))
    stage  on     peak
    0      cpu:0  3.00 MiB
    1      cpu:1  12 B
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)
    return "\n".join(lines)
