"""Writes small tables as text with aligned columns."""

from collections.abc import Sequence
from itertools import zip_longest


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Aligns the columns of a table; the first row holds their names.

    >>> print(columns([["stage", "on", "peak"], [0, "cpu:0", "3.00 MiB"], [1, "cpu:1", "12 B"]]))
    stage  on     peak
    0      cpu:0  3.00 MiB
    1      cpu:1  12 B
    """
    texts = [[str(cell) for cell in row] for row in rows]
    # A short row leaves its last columns empty: hence `zip_longest` here, and `map` below, which
    # stops at the end of the row.
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    lines = []
    for row in texts:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
