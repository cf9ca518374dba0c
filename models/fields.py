"""Fields of a model's configuration, replaced by what a user gave."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jvpipe.util.names import did_you_mean

Config = TypeVar("Config")
_ALSO = {"sequence_length": "tokens"}
"""Other names of fields, for configurations that lack the first."""


def with_fields(kind: str, config: Config, named: Mapping[str, Any]) -> Config:
    """A dataclass with fields replaced; text is read as what the field is now.

    Args:
        kind: of what it is the configuration, for messages.
        config: a dataclass.
        named: values by the name of their field; `sequence_length` may also be `tokens`.

    Raises:
        ValueError: there is no such field, a text cannot be read, or the configuration refuses a value.

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
    # Replaced all at once: __post_init__ checks them against each other and not one by one.
    return dataclasses.replace(chosen, **values)


def _read(where: str, value: Any, present: Any) -> Any:
    """A value as the type of the present one; of none that is a truth or a number, if it can be."""
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
            # Nothing tells the type: a whole number if it is one, else a number, else the text.
            numbers = (_number(kind, value) for kind in (int, float))
            return next((number for number in numbers if number is not None), value)
        case _:
            raise ValueError(
                f"{where} is {present!r}, which no text can replace: only numbers, texts, true and false"
            )


def _number(kind: type[int] | type[float], value: str) -> int | float | None:
    try:
        return kind(value)
    except ValueError:
        return None
