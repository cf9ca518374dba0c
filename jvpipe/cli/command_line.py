"""The reader of command lines, and of the file of options that `--config` names.

The value of an option comes from the first of these sources that has the option: the command line,
the file of `--config`, the config.json of the run that `--resume` continues, the default.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

import jvpipe
from jvpipe import models
from jvpipe.cli.command_options import NOT_KEPT, TrainOptions, check_each
from jvpipe.cli.outputs import check_figure, check_writable
from jvpipe.cli.own_model import ENTRY_POINTS
from jvpipe.cli.run_folder import MARK, RECORDED, RunDir, check_made_here
from jvpipe.cost.presets import PRESETS
from jvpipe.papers.registry import PLANNERS
from jvpipe.report.trackers import find_tracker
from jvpipe.schedules import SCHEDULES
from jvpipe.session.options import PipelineOptions
from jvpipe.util.brief import brief, first_line
from jvpipe.util.extras import MissingExtraError
from jvpipe.util.given import checked_path
from jvpipe.util.names import did_you_mean, repeated
from jvpipe.util.new_folder import check_new_folder
from jvpipe.util.option import Group, PipelineOption, options_of
from jvpipe.util.yaml_text import read_yaml

Values = dict[str, Any]
"""The values of options, by name."""
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a user's mistake; the commands print its message."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError; argparse would print the usage and end the process."""
        raise ValueError(message)


def read_options(
    holder: type[PipelineOptions], arguments: Sequence[str] | None, command: str
) -> Values:
    """Returns the values of the options on a command line, by name.

    The result lacks options that are not on the command line. `--help` and `--version` print their
    text and end the process.

    Args:
        holder: the dataclass that defines the command's options.
        arguments: the words of the command line; None for this process's command line.
        command: the name of the command after `python -m`.

    Raises:
        ValueError: an option is unknown, or its value cannot be converted to the option's type.
    """
    options = options_of(holder)
    said = sys.argv[1:] if arguments is None else arguments
    # argparse gets only the current names of options, so former names are replaced first.
    words = [_word(holder, word) for word in said if not _is_needless(options, word)]
    # The names of models are looked up only for `--help`, because the search takes time.
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
        flags = [option.flag for option in options.values()]
        raise ValueError(did_you_mean("option", unknown[0], flags))
    return {name: _of_text(options[name], value) for name, value in vars(namespace).items()}


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, PipelineOption]
) -> list[argparse.Action]:
    """Adds `--version` and the options of a command to a parser, each option in its group.

    Args:
        parser: the parser of a command.
        options: the options of the command, by name.

    Returns:
        The argparse action of each option, in the same order.
    """
    version = f"jvpipe {jvpipe.__version__}"
    parser.add_argument("--version", action="version", version=version, help="Prints the version.")
    groups = {group: parser.add_argument_group(group) for group in get_args(Group)}
    actions = []
    for name, option in options.items():
        kinds = option.kinds
        kind: dict[str, Any] = {"action": "store_true"}
        if bool not in kinds:
            action = "append" if tuple in kinds else "store"
            kind = {"action": action, "metavar": (option.unit or "name").upper()}
        elif NoneType in kinds:
            kind = {"action": argparse.BooleanOptionalAction}
        # argparse gets no defaults, so its result has only the options that the user gave.
        # The other options may come from a file.
        kind |= {"dest": name, "default": argparse.SUPPRESS, "help": _help(option)}
        actions.append(groups[option.group].add_argument(option.flag, **kind))
    return actions


def _help(option: PipelineOption) -> str:
    """Writes the help of an option for argparse, with the default in brackets if there is one."""
    default = f" ({option.default})" if option.default else ""
    return f"{option.help}{default}".replace("%", "%%")


def _word(holder: type[PipelineOptions], word: str) -> str:
    """Returns a word of a command line, with a former name of an option replaced."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or flag == "--":
        return word
    name = present(holder, flag[2:]).strip("_").replace("_", "-")
    return f"--{name}{equals}{value}"


def _is_needless(options: Mapping[str, PipelineOption], word: str) -> bool:
    """Tells whether a word is a former option without effect, and warns if so."""
    if word != "--no-lossy" or "lossy" not in options:
        return False
    _warn(f"{word} has no effect, and the next release will refuse it")
    return True


def present(holder: type[PipelineOptions], name: str) -> str:
    """Returns the current name of an option, and warns if `name` is a former name."""
    name = name.replace("-", "_")
    for option in options_of(holder).values():
        if name in option.was:
            _warn(f"{name} is called {option.name} now; the next release will refuse the old name")
            return option.name
    return name


def _warn(message: str) -> None:
    print("warning:", message, file=sys.stderr)


def _of_text(option: PipelineOption, text: Any) -> Any:
    """Converts a value to the type of its option; raises ValueError if that is impossible."""
    if isinstance(text, list):
        return tuple(text)
    if text == "None" and NoneType in option.kinds:
        return None
    if isinstance(text, bool):
        return text
    kind = next((number for number in (int, float) if number in option.kinds), str)
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{option.flag} must be {_WORDS[kind]}, not '{text}'") from error


def names() -> str:
    """Lists the names of models (with sizes), planners, schedules and hardware, a line per kind.

    >>> print(names())  # doctest: +ELLIPSIS
    Models: bert (tiny, mini, ...), ...; your own as file.py:NAME or package.module:NAME.
    <BLANKLINE>
    Planners: even, ...
    """
    by_option = names_by_option()
    found_models = [f"{name} ({_sizes(name)})" for name in by_option["model"]]
    found_models += [point.name for point in entry_points(group=ENTRY_POINTS)]
    lines = (
        f"Models: {', '.join(found_models)}; your own as file.py:NAME or package.module:NAME.",
        f"Planners: {', '.join(by_option['planner'])}.",
        f"Schedules: {', '.join(by_option['schedule'])}.",
        f"Hardware: {', '.join(by_option['hardware'])}, or a TOML file.",
    )
    return "\n\n".join(lines)


def names_by_option() -> dict[str, list[str]]:
    """Returns jvpipe's names of models, planners, schedules and hardware, by option."""
    return {
        "model": list(models.NAMES),
        "planner": [planner.name for planner in PLANNERS],
        "schedule": list(SCHEDULES),
        "hardware": list(PRESETS),
    }


def _sizes(name: str) -> str:
    """Lists the sizes of a model, or names the missing package that the model needs."""
    try:
        return ", ".join(models.sizes(name))
    except MissingExtraError as missing:
        return str(missing)


# The following functions take the value of an option from the sources in the module's docstring.


def given(arguments: Sequence[str] | None) -> TrainOptions:
    """Returns the options of the command line and of --config, without those of a resumed run.

    This checks only the options about processes. `parse` checks all options later, when the
    processes have connected and can fail together.
    """
    options = TrainOptions(**_values_given(arguments))
    check_each(options, "processes")
    return options


def parse(arguments: Sequence[str] | None, *, writes: bool = True) -> TrainOptions:
    """Returns the checked options of the command line, of --config and of the resumed run.

    Args:
        arguments: the words of the command line; None for this process's command line.
        writes: whether this process writes the files of the run, so that it must check their paths.

    Raises:
        ValueError: an option is unknown, has an impossible value or contradicts another option, or
            the folder of the run cannot be resumed.
    """
    by_name = _values_given(arguments)
    options = TrainOptions(**by_name)
    if options.resume:
        options = _resumed(options, by_name, writes)
    options.check()
    if not writes:
        return options
    if options.figure is not None:
        check_figure(options.figure)
    if options.export:
        check_writable(Path(options.export))
    if into := options.export_weights:
        check_new_folder(Path(into), f"--export-weights {into}")
    for tracker in options.track:
        find_tracker(tracker)
    return options


def _values_given(arguments: Sequence[str] | None) -> Values:
    """Returns the values on the command line and in the file of --config, by option name."""
    of_line = read_options(TrainOptions, arguments, "jvpipe.train")
    return _over(_of_config(of_line), of_line)


def _resumed(options: TrainOptions, by_name: Values, writes: bool) -> TrainOptions:
    """Returns the options of a resumed run.

    Args:
        options: the options of the command line and of --config, and defaults for the rest.
        by_name: the values on the command line and in the file of --config.
        writes: whether this process writes the files of the run.
    """
    if options.run_dir is None:
        raise ValueError("--resume needs --run-dir, the folder of the run to continue")
    before = RunDir(checked_path("--run-dir", options.run_dir))
    config = before.read_config()
    if options.nas or config.get("nas"):
        raise ValueError(
            "--nas cannot be resumed, because a search saves only its last architecture: begin a "
            "new run"
        )
    kept = {name: config[name] for name in options_of(TrainOptions) if name in config}
    saved = _typed(kept, f"{before.config} is not what a run wrote", NOT_KEPT, {})
    if (data := saved.get("data")) and not options.data:
        folder = options.run_dir
        print(f"data: {data}, as the run in {folder} used it; if it has moved, give --data")
    options = TrainOptions(**_over(saved, by_name))
    # The model that config.json names may be code in the folder. Only the process that writes the
    # files checks whether this code may be run. If the check fails, all processes stop.
    if writes and "model" not in by_name and not options.trust:
        check_made_here(before.path, config, options.model)
    if options.init_from and not saved.get("init_from"):
        raise ValueError(
            f"--init-from {options.init_from}: a resumed run already has its parameters; leave "
            "--init-from out"
        )
    if not options.shares and options.devices == saved.get("devices"):
        return replace(options, devices=None)
    return options


def _over(*sources: Values) -> Values:
    """Joins the values of several mappings; a later value replaces an earlier one.

    For an option that may be given several times, the values of all mappings are joined instead.
    A value that occurs twice is kept once, at its last place, because a resumed run may repeat the
    command line with which it began.
    """
    joined: Values = {}
    for source in sources:
        for name, value in source.items():
            if isinstance(value, tuple):
                values = (*joined.get(name, ()), *value)
                value = tuple(reversed(dict.fromkeys(reversed(values))))
            joined[name] = value
    return joined


# Files of options: `--config FILE`, and the config.json of a run.


def _of_config(options: Values) -> Values:
    """Returns the values in the file of --config, which is TOML, YAML or JSON, by option name.

    Names may have hyphens as on the command line. The file may also be the config.json of a run.
    From such a file, entries that are not options are ignored, and so are options that apply to
    only one start of a run.

    Raises:
        ValueError: the file cannot be read, has an unknown option, or has a value of a wrong type.
    """
    if options.get("config") is None:
        return {}
    path, lines = checked_path("--config", options["config"]), {}
    where = f"--config {path}"
    try:
        content = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            content_by_name, lines = read_yaml(content)
        elif path.suffix == ".toml":
            content_by_name = tomllib.loads(content)
        else:
            content_by_name = json.loads(content, object_pairs_hook=_mapping)
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or first_line(problem)
        raise ValueError(f"{where} cannot be read: {reason}") from problem
    if not isinstance(content_by_name, dict):
        kind = type(content_by_name).__name__
        raise ValueError(f"{where} must be a mapping from option names to values, not {kind}")
    # Entries are ignored only in the config.json of a run, which has an entry "data_digest".
    is_of_run = "data_digest" in content_by_name
    passed_over = (*RECORDED, "digest", MARK, *NOT_KEPT, "run_dir") if is_of_run else ()
    named, at, said = {}, {}, {}
    for name, value in content_by_name.items():
        now = present(TrainOptions, name)
        if now in named:
            raise ValueError(f"{where}: {said[now]} and {name} are one option: give only {now}")
        named[now], said[now] = value, name
        if name in lines:
            at[now] = f", line {lines[name]}"
    if isinstance(fields := named.get("set"), Mapping):
        named["set"] = [f"{name}={_field_text(value)}" for name, value in fields.items()]
    return _typed(named, where, passed_over, at)


def _mapping(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a mapping of the pairs of a JSON object; raises ValueError if a name is there twice."""
    twice = repeated(name for name, _ in pairs)
    if twice is not None:
        raise ValueError(f"{brief(twice)} is there twice: remove one of the two")
    return dict(pairs)


def _field_text(value: Any) -> str:
    """Returns the value of a field as a text for `--set`, with `true` and `false` as in JSON."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _typed(
    named: Values, where: str, passed_over: Collection[str], at: Mapping[str, str]
) -> Values:
    """Checks the values in a file against the types of their options, and returns them.

    A list becomes a tuple, and a whole number becomes a float if the option is a float.

    Args:
        named: the values by the names of options.
        where: the name of the file for messages.
        passed_over: the names of entries to ignore.
        at: the line of each name as a text for messages; empty if lines are not known.

    Raises:
        ValueError: there is no option of a name, or a value has a wrong type.
    """
    options, values = options_of(TrainOptions), {}
    for name, value in named.items():
        if name in passed_over:
            continue
        here = f"{where}{at.get(name, '')}"
        if name not in options:
            raise ValueError(f"{here}: {did_you_mean('option', name, list(options))}")
        kinds = options[name].kinds
        if isinstance(value, list) and tuple in kinds:
            value = tuple(value)
        elif type(value) is int and float in kinds:  # a file may have 1 for the rate 1.0
            with suppress(OverflowError):  # a number that no float can have is refused below
                value = float(value)
        has_texts = type(value) is not tuple or all(type(text) is str for text in value)
        if type(value) not in kinds or not has_texts:
            types = " or ".join(_WORDS[kind] for kind in kinds if kind is not NoneType)
            raise ValueError(f"{here}: {name} is {brief(value)}, but must be {types}")
        values[name] = value
    return values
