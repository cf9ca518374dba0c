"""Sizes in bytes, as people write them."""

from typing import Any

import pytest

from jvpipe.util.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("2 gib", 2 * 2**30),
        ("0.5MiB", 2**19),
        ("500MB", 500 * 10**6),
        ("1TiB", 2**40),
        ("12", 12),
        ("12 B", 12),
        (12, 12),
        (None, None),
    ],
)
def test_sizes_are_read(text: str | int | None, size: int | None) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *["", "GiB", "16 giga", "-1GiB", "0", 0, -5, True, "1e9", "\u0661"],
        *["0.5", "0.9B", "0.0005KiB", 0.5],
    ],
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(
        ValueError, match=r"is not a size: write bytes, or a text such as '16GiB' or '500MiB'"
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**20 - 6, "1023.99 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_bytes(size) == text
