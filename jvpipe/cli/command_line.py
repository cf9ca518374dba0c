"""Reading of command lines: options, files of options, and the names that `--help` lists."""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NoReturn, get_args

import jvpipe
from jvpipe import models
from jvpipe.cli.options import NOT_KEPT, TrainOptions, check_each
from jvpipe.cli.outputs import check_figure, check_new_folder, check_writable
from jvpipe.cli.own_model import ENTRY_POINTS
from jvpipe.cli.run_folder import MARK, RECORDED, RunDir, check_made_here
from jvpipe.cost.presets import PRESETS
from jvpipe.papers.registry import PLANNERS
from jvpipe.report.trackers import find_tracker
from jvpipe.schedules import SCHEDULES
from jvpipe.session.options import Group, Option, PipelineOptions, options_of
from jvpipe.util.brief import brief
from jvpipe.util.extras import MissingExtraError, extra
from jvpipe.util.names import did_you_mean

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a mistake, which is then shown in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError; argparse itself would print the usage and end the process."""
        raise ValueError(message)


def read_options(
    holder: type[PipelineOptions], arguments: Sequence[str] | None, command: str
) -> dict[str, Any]:
    """Returns the options that a command line gives, by name; `--help` and `--version` exit.

    Args:
        holder: the dataclass of the command's options.
        arguments: the command line; that of this process unless given.
        command: the name of the command after `python -m`.

    Raises:
        ValueError: an option is unknown, or its value is of another type.
    """
    options = options_of(holder)
    said = sys.argv[1:] if arguments is None else arguments
    # Old names of options are replaced before argparse sees them.
    words = [_word(holder, word) for word in said if not _is_needless(options, word)]
    # The names of models are looked up only for the help, because packages may have many.
    asked = {"-h", "--help"} & {*words}
    parser = _Parser(
        prog=f"python -m {command}",
        usage="%(prog)s [options]",
        description=f"{holder.__doc__}\n\n{names()}" if asked else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser, options)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(
            did_you_mean("option", unknown[0], [option.flag for option in options.values()])
        )
    return {name: _of_text(options[name], value) for name, value in vars(namespace).items()}


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, Option]
) -> list[argparse.Action]:
    """Adds options to a parser, each in its group, and `--version`; returns argparse's actions.

    Args:
        parser: the parser of a command.
        options: the options of the command, by name.
    """
    version = f"jvpipe {jvpipe.__version__}"
    parser.add_argument("--version", action="version", version=version, help="Says which it is.")
    groups = {group: parser.add_argument_group(group) for group in get_args(Group)}
    actions = []
    for name, option in options.items():
        kind: dict[str, Any] = {"action": "store_true"}
        if bool in option.kinds and NoneType in option.kinds:
            kind = {"action": argparse.BooleanOptionalAction}
        elif bool not in option.kinds:
            repeated = tuple in option.kinds
            kind = {
                "action": "append" if repeated else "store",
                "metavar": (option.unit or "name").upper(),
            }
        add = groups[option.group].add_argument
        # argparse gets no defaults: an option that is not given must differ from one that is given
        # with its default, because only the former may come from a file.
        settings = {"dest": name, "default": argparse.SUPPRESS, "help": _help(option)}
        actions.append(add(option.flag, **settings, **kind))
    return actions


def _help(option: Option) -> str:
    """Writes a line of `--help`, with the default in brackets if there is one."""
    line = option.help if not option.default else f"{option.help} ({option.default})"
    return line.replace("%", "%%")


def _word(holder: type[PipelineOptions], word: str) -> str:
    """Rewrites a word that is an option: with hyphens, and with the option's present name."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or flag == "--":
        return word
    name = present(holder, flag[2:]).strip("_").replace("_", "-")
    return f"--{name}{equals}{value}"


def _is_needless(options: Mapping[str, Option], word: str) -> bool:
    """Tells whether a word is a former option that is now always on; warns of it if so."""
    if word != "--no-lossy" or "lossy" not in options:
        return False
    warning = f"warning: {word} holds anyway, and is refused from the next release on"
    print(warning, file=sys.stderr)
    return True


def present(holder: type[PipelineOptions], name: str) -> str:
    """Returns the present name of an option, and warns if `name` is one that it had before."""
    name = name.replace("-", "_")
    for option in options_of(holder).values():
        if name in option.was:
            warning = f"warning: {name} is called {option.name} now, and that name alone from the next release on"
            print(warning, file=sys.stderr)
            return option.name
    return name


def _of_text(option: Option, text: Any) -> Any:
    """Converts the value of an option to the option's type."""
    if isinstance(text, list):
        return tuple(text)
    if text == "None" and NoneType in option.kinds:
        return None
    number = next((kind for kind in (int, float) if kind in option.kinds), str)
    try:
        return text if isinstance(text, bool) else number(text)
    except ValueError as error:
        raise ValueError(f"{option.flag} must be {_WORDS[number]}, not '{text}'") from error


def names() -> str:
    """Lists models with their sizes, planners, schedules and hardware, one line for each kind.

    >>> print(names())  # doctest: +ELLIPSIS
    Models: bert (tiny, mini, ...), ...; your own as file.py:NAME or package.module:NAME.
    <BLANKLINE>
    Planners: even, ...
    """
    known = names_by_option()
    found_models = [f"{name} ({_sizes(name)})" for name in known["model"]]
    found_models += [point.name for point in entry_points(group=ENTRY_POINTS)]
    lists = {
        "Planners": known["planner"],
        "Schedules": known["schedule"],
        "Hardware": [*known["hardware"], "or a TOML file"],
    }
    lines = [f"Models: {', '.join(found_models)}; your own as file.py:NAME or package.module:NAME."]
    return "\n\n".join(
        [*lines, *(f"{kind}: {', '.join(members)}." for kind, members in lists.items())]
    )


def names_by_option() -> dict[str, list[str]]:
    """Returns the names that jvpipe itself has, by the option that takes them."""
    return {
        "model": list(models.NAMES),
        "planner": [planner.name for planner in PLANNERS],
        "schedule": list(SCHEDULES),
        "hardware": list(PRESETS),
    }


def _sizes(name: str) -> str:
    """Lists the sizes of a model; if a package that it needs is not installed, says which."""
    try:
        return ", ".join(models.sizes(name))
    except MissingExtraError as missing:
        return str(missing)


# Options of the command line come before those of --config, and these before a resumed run's.


def given(arguments: Sequence[str] | None) -> TrainOptions:
    """Returns the options of the command line, or else of --config, or else the defaults.

    Only those about processes are checked, because processes meet before the rest is checked.
    """
    of_line = read_options(TrainOptions, arguments, "jvpipe.train")
    options = _over(of_line, _of_config(of_line))
    check_each(options, "processes")
    return options


def parse(arguments: Sequence[str] | None, *, writes: bool = True) -> TrainOptions:
    """Returns the options of the command line, of --config, or of the resumed run, in this order.

    Options that none of the three has get their defaults.

    Args:
        arguments: the command line; that of this process unless given.
        writes: whether this process writes the files of the run.
    """
    of_line = read_options(TrainOptions, arguments, "jvpipe.train")
    of_file = _of_config(of_line)
    options = _over(of_line, of_file)
    if options.resume:
        options = _resumed(options, of_line, of_file, writes)
    options.check()
    if not writes:
        return options
    if options.figure is not None:
        check_figure(options.figure)
    if options.export:
        check_writable(Path(options.export))
    if options.export_weights:
        check_new_folder(Path(options.export_weights))
    for tracker in options.track:
        find_tracker(tracker)
    return options


def _resumed(
    options: TrainOptions, of_line: Mapping[str, Any], of_file: Mapping[str, Any], writes: bool
) -> TrainOptions:
    """Returns the options of a resumed run.

    Args:
        options: the options of the command line and of --config, the others by default.
        of_line: the options of the command line.
        of_file: the options of --config.
        writes: whether this process writes the files of the run.
    """
    if options.run_dir is None:
        raise ValueError("--resume needs --run-dir, the folder of the run to continue")
    before = RunDir(Path(options.run_dir))
    config = before.read_config()
    if options.nas or config.get("nas"):
        raise ValueError(
            "--nas cannot be resumed: a search saves its last architecture alone. Begin a new run"
        )
    kept = {name: config[name] for name in options_of(TrainOptions) if name in config}
    saved = _typed(kept, f"{before.config} is not what a run wrote", NOT_KEPT)
    if saved.get("data") and not options.data:
        print(
            f"data: {saved['data']}, as the run in {options.run_dir} had it; --data says where it is now"
        )
    trusted, named = options.trust, "model" in {**of_line, **of_file}
    options = _over(of_line, {**saved, **of_file})
    # One process asks whether the folder's code may be run, and the others follow its answer.
    if writes and not named and not trusted:
        check_made_here(before.path, config, options.model)
    if options.init_from and not saved.get("init_from"):
        raise ValueError(
            f"--init-from {options.init_from}: a run that is resumed has its parameters, leave it out"
        )
    if not options.shares and options.devices == saved.get("devices"):
        return replace(options, devices=None)
    return options


def _over(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> TrainOptions:
    """Returns options in which `later` replaces `earlier`, or adds to it if it may be repeated."""
    added = {
        name: (*earlier.get(name, ()), *value)
        for name, value in later.items()
        if isinstance(value, tuple)
    }
    return TrainOptions(**{**earlier, **later, **added})


# Files of options: `--config FILE`, and the config.json of a run.


def _of_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in the file of --config, which is TOML, YAML or JSON.

    Names may have hyphens as on the command line. The config.json of a run may be used as well. Its
    entries that are not options, and options that were for one start only, are passed over.

    Raises:
        ValueError: the file cannot be read, has an unknown option, or a value of another type.
    """
    if options.get("config") is None:
        return {}
    path, lines = Path(options["config"]), {}
    where = f"--config {path}"
    try:
        content = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            content_by_name, lines = read_yaml(content)
        else:
            content_by_name = (
                tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
            )
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise ValueError(f"{where} cannot be read: {reason}") from problem
    if not isinstance(content_by_name, dict):
        raise ValueError(f"{where} holds no options by name, but {type(content_by_name).__name__}")
    # A run's config.json has entries that are not options. It is recognised by its "data_digest".
    passed_over = (*RECORDED, "digest", MARK, *NOT_KEPT, "run_dir")
    if "data_digest" not in content_by_name:
        passed_over = ()
    named = {present(TrainOptions, name): value for name, value in content_by_name.items()}
    at = {present(TrainOptions, name): f", line {line}" for name, line in lines.items()}
    if isinstance(fields := named.get("set"), Mapping):
        named["set"] = [f"{name}={_text(value)}" for name, value in fields.items()]
    return _typed(named, where, passed_over, at)


def _typed(
    named: Mapping[str, Any],
    where: str,
    passed_over: Collection[str],
    at: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the options of a file, with lists as tuples, and whole numbers as floats if needed.

    Args:
        named: values by the names of options.
        where: names the file in messages.
        passed_over: names that may be in the file and are not options.
        at: the line of each name, for messages.

    Raises:
        ValueError: there is no option of that name, or its value is of another type.
    """
    options, values = options_of(TrainOptions), {}
    for name, value in named.items():
        if name in passed_over:
            continue
        if name not in options:
            unknown = did_you_mean("option", name, list(options))
            raise ValueError(f"{where}{at.get(name, '')}: {unknown}")
        kinds = options[name].kinds
        value = tuple(value) if isinstance(value, list) and tuple in kinds else value
        # A file may have 1 as a rate, which is then meant as 1.0.
        value = float(value) if type(value) is int and float in kinds else value
        texts = type(value) is not tuple or all(type(text) is str for text in value)
        if type(value) not in kinds or not texts:
            types = " or ".join(_WORDS[kind] for kind in kinds if kind is not NoneType)
            raise ValueError(
                f"{where}{at.get(name, '')}: {name} is {brief(value)}, and should be {types}"
            )
        values[name] = value
    return values


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3, which YAML 1.1 takes for a text, because they have no point."""


def read_yaml(content: str) -> tuple[Any, dict[str, int]]:
    r"""Reads a YAML document; returns its value, and the line of each name at the top level.

    Raises:
        ValueError: it is not YAML, or a mapping has a name twice; the message has the line.

    >>> read_yaml("stages: 4\nlearning-rate: 1e-3\n")
    ({'stages': 4, 'learning-rate': 0.001}, {'stages': 1, 'learning-rate': 2})
    """
    with extra("cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            first: dict[str, int] = {}
            for name, _ in node.value:
                line = name.start_mark.line + 1
                if name.value in first:
                    raise ValueError(
                        f"line {line}: {name.value} is in line {first[name.value]} already: take one of them out"
                    )
                first[name.value] = line
            return super().construct_mapping(node, deep)

    # The safe loader makes only plain data and runs no code from the file.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    loader = Loader(content)
    try:
        top = loader.get_single_node()
        value = None if top is None else loader.construct_document(top)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{problem.problem}") from problem
    names = top.value if isinstance(top, yaml.MappingNode) else []
    return value, {str(name.value): name.start_mark.line + 1 for name, _ in names}
