"""What a command line reads: its options, files of options, and with `--help` all names that there are."""

import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

import jvpipe
from jvpipe import models
from jvpipe.cli.own_model import ENTRY_POINTS
from jvpipe.cost.presets import PRESETS
from jvpipe.papers.registry import PLANNERS
from jvpipe.schedules import SCHEDULES
from jvpipe.util.extras import MissingExtraError, extra
from jvpipe.util.names import did_you_mean

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


# YAML as files of options are written: each name once, and numbers as people write them.

_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3, which YAML 1.1 takes for a text, for they have no point."""


def read_yaml(content: str) -> tuple[Any, dict[str, int]]:
    r"""Reads a document; also tells the line of each name at its top.

    Raises:
        ValueError: it is no YAML, or a name is there twice; the message has the line.

    >>> read_yaml("stages: 4\nlearning-rate: 1e-3\n")
    ({'stages': 4, 'learning-rate': 0.001}, {'stages': 1, 'learning-rate': 2})
    """
    with extra("cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    try:
        top = yaml.compose(content, Loader=Loader)
        _check_names(_mappings(top))
        value = yaml.load(content, Loader=Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{problem.problem}") from problem
    names = top.value if isinstance(top, yaml.MappingNode) else []
    return value, {str(name.value): name.start_mark.line + 1 for name, _ in names}


def _mappings(node: Any) -> Iterator[Any]:
    """The mappings of a document, as lists of pairs of nodes."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    if pairs:
        yield pairs
    below = [value for _, value in pairs]
    if node is not None and node.id == "sequence":
        below = node.value
    for each in below:
        yield from _mappings(each)


def _check_names(mappings: Iterator[Any]) -> None:
    """Raises ValueError for a name that a mapping has twice."""
    for pairs in mappings:
        first: dict[str, int] = {}
        for name, _ in pairs:
            line = name.start_mark.line + 1
            if name.value in first:
                raise ValueError(
                    f"line {line}: {name.value} is in line {first[name.value]} already: "
                    "take one of them out"
                )
            first[name.value] = line


# Files of options: `--config FILE`, and the config.json of a run.

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
            told, lines = read_yaml(content)
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
