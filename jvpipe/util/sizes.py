"""Reads and writes numbers of bytes as people write them, such as 16GiB."""

import re
from collections.abc import Sequence

from jvpipe.util.brief import brief

_BINARY = {f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", 1)}
_DECIMAL = {f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", 1)}
GIB = 1024**3
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
"""Matches a number with an optional unit after it."""
_UNITS = {"": 1, "b": 1} | _BINARY | _DECIMAL
MOST_BYTES = 2**52
"""More bytes than any device has. Floats represent every whole number up to this one exactly."""
MOST_S = 1e12
"""More seconds than any computation takes: some 30,000 years."""
ROUNDING = 1e-9
"""Two sums of seconds count as equal if their relative difference is smaller than this."""


def parse_bytes(size: int | str | None, said: str = "memory limit") -> int | None:
    """Returns the bytes that a number or a text such as "16GiB" stands for; None for None.

    Args:
        size: the number or the text.
        said: how messages name it.

    Raises:
        ValueError: `size` is not a size, is below one byte, or is more than `MOST_BYTES`.

    >>> parse_bytes("1.5 GiB"), parse_bytes(1000), parse_bytes(None)
    (1610612736, 1000, None)
    """
    if size is None:
        return None
    # In Python, True and False are also integers, but as a size they are mistakes.
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MOST_BYTES:
        return size
    match = _SIZE.fullmatch(str(size))
    unit_bytes = _UNITS.get(match[2].lower()) if match else None
    size_bytes = float(match[1]) * unit_bytes if match and unit_bytes else 0
    if size_bytes < 1:
        raise ValueError(
            f"{said} {brief(size)} is not a size: write bytes, or a text such as '16GiB' or '500MiB'"
        )
    if size_bytes > MOST_BYTES:
        raise ValueError(
            f"{said} {brief(size)} is more than {MOST_BYTES} bytes, which no machine has: "
            "give a smaller limit or none"
        )
    return int(size_bytes)


def parse_limits(
    sizes: int | str | Sequence[int | str | None] | None,
) -> int | tuple[int, ...] | None:
    """Reads one memory limit for all devices, or a limit for each.

    Args:
        sizes: one size as for `parse_bytes`, or several, in a sequence or in a text with commas.

    Returns:
        The bytes of the limit or limits; None if there is no limit.

    Raises:
        ValueError: a size is wrong, or a sequence is empty or contains None.

    >>> parse_limits("24GiB,11GiB"), parse_limits([1000, "2kB"])
    ((25769803776, 11811160064), (1000, 2000))
    >>> parse_limits("16GiB"), parse_limits(None)
    (17179869184, None)
    """
    if isinstance(sizes, str) and "," in sizes:
        sizes = sizes.split(",")
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        return parse_bytes(sizes)
    limits = list(map(parse_bytes, sizes))
    if not limits or None in limits:
        raise ValueError(
            f"memory limits {brief(sizes)}: give one size for all devices, or one for each"
        )
    return tuple(limit for limit in limits if limit is not None)


def limits_of_each(limits: int | tuple[int, ...] | None, devices: int) -> tuple[int, ...]:
    """Returns the limit of each device; an empty tuple if there is no limit.

    Args:
        limits: the bytes of one limit for all devices, or of a limit for each.
        devices: the number of devices.

    Raises:
        ValueError: there are more or fewer limits than devices.

    >>> limits_of_each(24, 3), limits_of_each((24, 11), 2), limits_of_each(None, 2)
    ((24, 24, 24), (24, 11), ())
    """
    if limits is None:
        return ()
    if isinstance(limits, int):
        return (limits,) * devices
    if len(limits) != devices:
        sizes = ", ".join(map(format_bytes, limits))
        raise ValueError(
            f"{len(limits)} memory limits ({sizes}) for {devices} devices: "
            "give one for each device, in their order, or a single one for all"
        )
    return limits


def format_bytes(size: int) -> str:
    """Writes bytes for people to read; a difference of sizes may be negative.

    >>> format_bytes(1610612736), format_bytes(-1536)
    ('1.50 GiB', '-1.50 KiB')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        digits = 0 if unit == "B" else 2
        # The value is rounded before the comparison: 1048575 bytes are 1.00 MiB, not 1024.00 KiB.
        if round(abs(value), digits) < 1024:
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
