"""Fields of configurations, replaced by texts and values."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from jvpipe.models.fields import with_fields


@dataclass(frozen=True)
class Shape:
    blocks: int = 2
    dropout: float = 0.0
    tied: bool = True
    dtype: str = "float32"
    heads: int | None = None
    tokens: int = 8
    sizes: tuple[int, ...] = (1, 2)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} must be at least 1")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"blocks": "12"}, "blocks", 12),
        ({"blocks": 12}, "blocks", 12),
        ({"dropout": "1e-1"}, "dropout", 0.1),
        ({"tied": "False"}, "tied", False),
        ({"dtype": "12"}, "dtype", "12"),
        ({"heads": "3"}, "heads", 3),
        ({"heads": "all"}, "heads", "all"),
        ({"sequence_length": 16}, "tokens", 16),
    ],
)
def test_values_are_read_as_what_they_replace(given: dict[str, Any], name: str, value: Any) -> None:
    found = getattr(with_fields("mine", Shape(), given), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"block": 1}, "unknown option of mine 'block': did you mean 'blocks'"),
        ({"made": 1}, "unknown option of mine 'made'"),
        ({"blocks": "1.5"}, "blocks of mine is 2: give a whole number, not '1.5'"),
        ({"dropout": "much"}, r"dropout of mine is 0\.0: give a number"),
        ({"tied": "1"}, "tied of mine is True: give true or false"),
        ({"sizes": "1"}, "which a text cannot replace"),
        ({"blocks": "0"}, "blocks=0 must be at least 1"),
    ],
)
def test_what_cannot_be_read_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        with_fields("mine", Shape(), given)
