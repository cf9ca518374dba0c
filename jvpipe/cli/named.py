"""What a command line reads: its options, `--version`, and with `--help` all names that there are."""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

import jvpipe
from jvpipe import models
from jvpipe.cli.found_model import ENTRY_POINTS
from jvpipe.cost.presets import PRESETS
from jvpipe.ir.extras import MissingExtraError
from jvpipe.papers.registry import PLANNERS
from jvpipe.schedules import SCHEDULES

T = TypeVar("T")


def parsed(
    options: type[T], arguments: Sequence[str] | None, command: str, default: Any = None
) -> T:
    """The options of a command line; ends the process for `--help` and `--version`.

    Args:
        options: a dataclass of them.
        arguments: those of this process unless given.
        command: what comes after `python -m`.
        default: what holds for options that are not given.

    Raises:
        ValueError: what is given for a number is none.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--version" in given:
        print(f"jvpipe {jvpipe.__version__}")
        raise SystemExit(0)
    _check_numbers(options, given)
    asked = {"-h", "--help"} & set(given)
    told = f"{options.__doc__}\n\n{names()}" if asked else None
    kept = {} if default is None else {"default": default}
    return tyro.cli(options, args=given, prog=f"python -m {command}", description=told, **kept)


def _check_numbers(options: type[Any], given: Sequence[str]) -> None:
    """Raises ValueError where tyro would tell in a page that a text is no number."""
    types = get_type_hints(options)
    for text, after in pairwise([*given, "--"]):
        flag, equals, value = text.partition("=")
        wanted = types.get(flag.removeprefix("--").replace("-", "_"))
        kinds = get_args(wanted) or (wanted,)
        number = next((kind for kind in (int, float) if kind in kinds), None)
        value, none = value if equals else after, "None" if NoneType in kinds else None
        if (
            number is None
            or not flag.startswith("--")
            or value == none
            or (value.startswith("--") and not equals)
        ):
            continue
        try:
            number(value)
        except ValueError as error:
            what = "a whole number" if number is int else "a number"
            raise ValueError(f"{flag} must be {what}, not '{value}'") from error


def names() -> str:
    """Models with their sizes, planners, schedules and hardware, a line each.

    >>> print(names())  # doctest: +ELLIPSIS
    Models: bert (tiny, mini, ...), ...; your own as file.py:NAME or package.module:NAME.
    <BLANKLINE>
    Planners: even, ...
    """
    known = [f"{name} ({_sizes(name)})" for name in models.NAMES]
    known += [point.name for point in entry_points(group=ENTRY_POINTS)]
    lists = {
        "Planners": [planner.name for planner in PLANNERS],
        "Schedules": list(SCHEDULES),
        "Hardware": [*PRESETS, "or a TOML file"],
    }
    lines = [f"Models: {', '.join(known)}; your own as file.py:NAME or package.module:NAME."]
    return "\n\n".join([*lines, *(f"{kind}: {', '.join(each)}." for kind, each in lists.items())])


def _sizes(name: str) -> str:
    """The sizes of a model, as far as what it is made with is installed."""
    try:
        return ", ".join(models.sizes(name))
    except MissingExtraError as missing:
        return str(missing)
