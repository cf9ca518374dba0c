"""Files of options: `--config FILE`, and the config.json of a run."""

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from jvpipe.cli import yaml_file
from jvpipe.ir.names import did_you_mean

RECORDED = ("model_config", "parameters", "data_digest", "files", "digest", "made_here")
"""What config.json holds beside options."""
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}


def read_options(
    path: Path, types: Mapping[str, Any], of_one_start: Collection[str]
) -> dict[str, Any]:
    """The options in a file, TOML, YAML or JSON; names may have hyphens as on the command line.

    Of a run's config.json what is no option, and what held for that start alone, is passed over.

    Args:
        path: of the file.
        types: of the options, by name.
        of_one_start: options that are passed over in what a run wrote.

    Raises:
        ValueError: it is no such file, names what is no option, or a value is of another type.
    """
    lines: dict[str, int] = {}
    try:
        content = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            told, lines = yaml_file.read(content)
        else:
            told = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise ValueError(f"--config {path} cannot be read: {reason}") from problem
    if not isinstance(told, dict):
        raise ValueError(f"--config {path} holds no options by name, but {type(told).__name__}")
    if "data_digest" in told:  # a run wrote it
        told = {
            name: value for name, value in told.items() if name not in (*RECORDED, *of_one_start)
        }
    named = {name.replace("-", "_"): value for name, value in told.items()}
    at = {name.replace("-", "_"): f", line {line}" for name, line in lines.items()}
    if unknown := next((name for name in named if name not in types), None):
        told = did_you_mean("option", unknown, list(types))
        raise ValueError(f"--config {path}{at.get(unknown, '')}: {told}")
    if isinstance(fields := named.get("set"), Mapping):
        named["set"] = [f"{name}={_text(value)}" for name, value in fields.items()]
    values = {name: as_type(value, types[name]) for name, value in named.items()}
    for name, value in values.items():
        if not is_type(value, types[name]):
            raise ValueError(
                f"--config {path}{at.get(name, '')}: {name} is {value!r}, "
                f"and should be {_wanted(types[name])}"
            )
    return values


def as_type(value: Any, wanted: Any) -> Any:
    """What JSON and TOML have for a value of a type: lists for tuples, whole numbers for numbers.

    >>> as_type(1, float | None), as_type(["a"], tuple[str, ...]), as_type("a", int)
    (1.0, ('a',), 'a')
    """
    if isinstance(value, list) and get_origin(wanted) is tuple:
        return tuple(value)
    return (
        float(value)
        if type(value) is int and float in _kinds(wanted) and int not in _kinds(wanted)
        else value
    )


def is_type(value: Any, wanted: Any) -> bool:
    """Whether a value is of the type of an option.

    >>> is_type(None, int | None), is_type(True, int), is_type(("a", 1), tuple[str, ...])
    (True, False, False)
    """
    if type(value) is tuple and get_origin(wanted) is tuple:
        return all(type(each) is str for each in value)
    return type(value) in _kinds(wanted)


def _kinds(wanted: Any) -> tuple[type, ...]:
    return (tuple,) if get_origin(wanted) is tuple else get_args(wanted) or (wanted,)


def _wanted(wanted: Any) -> str:
    return " or ".join(_WORDS[kind] for kind in _kinds(wanted) if kind is not NoneType)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
