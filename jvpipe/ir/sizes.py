"""Sizes in bytes, as people write them."""

import re

_BINARY = {f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", 1)}
_DECIMAL = {f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", 1)}
_UNITS = {"": 1, "b": 1} | _BINARY | _DECIMAL
MOST_BYTES = 2**52
"""More than anything holds, and still counted one by one by floats."""


def parse_bytes(size: int | str | None) -> int | None:
    """Bytes from a number or a text such as "16GiB".

    >>> parse_bytes("1.5 GiB"), parse_bytes(1000), parse_bytes(None)
    (1610612736, 1000, None)
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MOST_BYTES):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory limit {size!r} is not a size: write bytes, or a text such as '16GiB' or '500MiB'")
    size_bytes = float(match[1]) * _UNITS[match[2].lower()]
    if size_bytes > MOST_BYTES:
        raise ValueError(f"memory limit {size!r} is more than {MOST_BYTES} bytes, which no device has: leave it out")
    return int(size_bytes)


def format_bytes(size: int) -> str:
    """Bytes for people to read.

    >>> format_bytes(1610612736)
    '1.50 GiB'
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
