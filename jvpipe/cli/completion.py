"""Completion: the script with which a shell completes `jvpipe`, its commands, options and names."""

import argparse
from collections.abc import Mapping
from typing import Any

from jvpipe.cli.command_line import add_options, names_by_option
from jvpipe.session.options import PipelineOptions, options_of
from jvpipe.util.extras import extra
from jvpipe.util.names import did_you_mean

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: str, commands: Mapping[str, type[PipelineOptions]]) -> str:
    """Writes the completion script of `jvpipe` for a shell.

    Args:
        shell: one of SHELLS.
        commands: the options of each command.

    Raises:
        ValueError: the shell is not known.
        MissingExtraError: shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(did_you_mean("shell", shell, SHELLS))
    with extra("cli"):
        import shtab
    whole = argparse.ArgumentParser(prog="jvpipe")
    inner = whole.add_subparsers()
    for command, holder in commands.items():
        parser = inner.add_parser(command, help=holder.__doc__)
        for action in add_options(parser, options_of(holder)):
            _complete(action, shtab.FILE, shtab.DIRECTORY)
    inner.add_parser("completion", help="Completion for a shell.").add_argument(
        "shell", choices=SHELLS
    )
    return shtab.complete(whole, shell)


def _complete(action: Any, file: Mapping[str, Any], folder: Mapping[str, Any]) -> None:
    """Says what may follow an option: one of some names, a file or a folder."""
    action.choices = names_by_option().get(action.dest)
    if action.metavar in ("FILE", "PATH"):
        action.complete = file
    elif action.metavar == "FOLDER":
        action.complete = folder
