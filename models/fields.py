"""Replaces fields of a model's configuration with a user's options."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jvpipe.util.names import did_you_mean

Config = TypeVar("Config")
_ALSO = {"sequence_length": "tokens"}
"""Aliases: if a configuration lacks a field of the first name, the name means the second one."""


def with_fields(kind: str, config: Config, named: Mapping[str, Any]) -> Config:
    """Replaces fields of a dataclass. A text is converted to the type of the field's present value.

    Args:
        kind: the name of the model, for messages.
        config: an instance of a dataclass.
        named: values by field name. `sequence_length` may also stand for `tokens`.

    Raises:
        ValueError: a field does not exist, a text cannot be converted, or the configuration rejects
            a value.

    >>> @dataclasses.dataclass
    ... class Shape:
    ...     blocks: int = 2
    ...     tied: bool = True
    >>> with_fields("mine", Shape(), {"blocks": "12", "tied": "false"})
    Shape(blocks=12, tied=False)
    >>> with_fields("mine", Shape(), {"block": 12})
    Traceback (most recent call last):
    ValueError: unknown option of mine 'block': did you mean 'blocks'? There are blocks, tied
    """
    chosen: Any = config
    fields = [field.name for field in dataclasses.fields(chosen) if field.init]
    values: dict[str, Any] = {}
    for name, value in named.items():
        field_name = name if name in fields else _ALSO.get(name, name)
        if field_name not in fields:
            raise ValueError(did_you_mean(f"option of {kind}", name, fields))
        present = getattr(chosen, field_name)
        values[field_name] = _read(f"{field_name} of {kind}", value, present)
    # All fields are replaced at once, because __post_init__ checks whether they fit together.
    return dataclasses.replace(chosen, **values)


def _read(where: str, value: Any, present: Any) -> Any:
    """Converts a text to the type of a field's present value; returns other values unchanged."""
    if not isinstance(value, str) or isinstance(present, str):
        return value
    match present:
        case bool():
            if value.lower() in ("true", "false"):
                return value.lower() == "true"
            raise ValueError(f"{where} is {present}: give true or false, not '{value}'")
        case int() | float():
            try:
                return type(present)(value)
            except ValueError:
                expected = "a whole number" if isinstance(present, int) else "a number"
                raise ValueError(f"{where} is {present}: give {expected}, not '{value}'") from None
        case None if value.lower() in ("true", "false"):
            return value.lower() == "true"
        case None:
            # None does not show the type, so a whole number is tried, then a number, then the text.
            numbers = (_number(kind, value) for kind in (int, float))
            return next((number for number in numbers if number is not None), value)
        case _:
            raise ValueError(
                f"{where} is {present!r}, which a text cannot replace: a text can only replace "
                "numbers, texts, true and false"
            )


def _number(kind: type[int] | type[float], value: str) -> int | float | None:
    try:
        return kind(value)
    except ValueError:
        return None
