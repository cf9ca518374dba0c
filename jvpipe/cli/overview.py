"""The command `python -m jvpipe`, which prints an overview of the commands or runs one of them."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jvpipe
from jvpipe.cli import plan_command, train_command
from jvpipe.cli.command_line import add_options, names, names_by_option
from jvpipe.cli.command_options import TrainOptions
from jvpipe.session.options import PipelineOptions
from jvpipe.util.extras import extra
from jvpipe.util.names import did_you_mean
from jvpipe.util.option import options_of

_OPTIONS = {"train": TrainOptions, "plan": plan_command.PlanOptions}


def _print_completion(arguments: Sequence[str]) -> int:
    """Prints the completion script of a shell; returns the exit code."""
    try:
        (shell,) = arguments
        print(completion(shell, _OPTIONS))
    except ValueError as problem:
        message = problem if len(arguments) == 1 else f"name one shell: {', '.join(SHELLS)}"
        print("error:", message, file=sys.stderr)
        return 2
    return 0


_COMMANDS = {
    "train": train_command.main,
    "plan": plan_command.main,
    "completion": _print_completion,
}
_OVERVIEW = """\
python -m jvpipe train --model bert --stages 2     trains a pipeline on this machine's devices
python -m jvpipe plan --model bert --size large    plans for other hardware; runs no model
jvpipe completion bash                             prints completions for bash, zsh or tcsh
python -m jvpipe train --help, python -m jvpipe plan --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, which is 2 for a user's mistake."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    if words and words[0] not in ("-h", "--help", "--version"):
        print("error:", did_you_mean("command", words[0], list(_COMMANDS)), file=sys.stderr)
        return 2
    print(f"jvpipe {jvpipe.__version__}")
    if words != ["--version"]:
        print(f"\n{_OVERVIEW}\n{names()}")
    return 0


SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: str, commands: Mapping[str, type[PipelineOptions]]) -> str:
    """Returns the script with which a shell completes command lines of `jvpipe`.

    Args:
        shell: one of `SHELLS`.
        commands: by the name of each command, the dataclass that defines its options.

    Raises:
        ValueError: the shell is not one of `SHELLS`.
        MissingExtraError: shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(did_you_mean("shell", shell, SHELLS))
    with extra("cli"):
        import shtab
    # This parser, with a subparser for each command, exists only for shtab. It parses nothing.
    whole = argparse.ArgumentParser(prog="jvpipe")
    inner = whole.add_subparsers()
    for command, holder in commands.items():
        parser = inner.add_parser(command, help=holder.__doc__)
        for action in add_options(parser, options_of(holder)):
            _complete(action, shtab.FILE, shtab.DIRECTORY)
    last = inner.add_parser("completion", help="Completion for a shell.")
    last.add_argument("shell", choices=SHELLS)
    return shtab.complete(whole, shell)


def _complete(action: Any, file: Mapping[str, Any], folder: Mapping[str, Any]) -> None:
    """Sets the completions of an option's value: names that jvpipe defines, files or folders.

    Args:
        action: the argparse action of the option.
        file: shtab's constant for completing files.
        folder: shtab's constant for completing folders.
    """
    action.choices = names_by_option().get(action.dest)
    if action.metavar in ("FILE", "PATH"):
        action.complete = file
    elif action.metavar == "FOLDER":
        action.complete = folder
