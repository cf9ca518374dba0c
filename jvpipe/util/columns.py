"""Writes small tables as text with aligned columns."""

from collections.abc import Sequence
from itertools import zip_longest


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Aligns the columns of a table, whose first row has the column names.

    >>> print(columns([["stage", "on", "peak"], [0, "cpu:0", "3.00 MiB"], [1, "cpu:1", "12 B"]]))
    stage  on     peak
    0      cpu:0  3.00 MiB
    1      cpu:1  12 B
    """
    texts = [list(map(str, row)) for row in rows]
    # Some rows may be shorter than others. For the widths, `zip_longest` adds empty cells to
    # short rows. The `map` below stops at the last cell of each row.
    cells_below = zip_longest(*texts, fillvalue="")
    widths = [max(map(len, cells)) for cells in cells_below]
    lines = []
    for row in texts:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
