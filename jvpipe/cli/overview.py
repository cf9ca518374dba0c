"""`python -m jvpipe`: the version, the commands and the names that they know; or one of the commands."""

import sys
from collections.abc import Sequence

import jvpipe
from jvpipe.cli import plan, train
from jvpipe.cli.command_line import names
from jvpipe.cli.completion import SHELLS, completion
from jvpipe.cli.options import TrainOptions
from jvpipe.util.names import did_you_mean

_OPTIONS = {"train": TrainOptions, "plan": plan.PlanOptions}


def _complete(arguments: Sequence[str]) -> int:
    """Prints the script that completes `jvpipe` in a shell."""
    try:
        (shell,) = arguments
        print(completion(shell, _OPTIONS))
    except ValueError as problem:
        message = problem if len(arguments) == 1 else f"name one shell: {', '.join(SHELLS)}"
        print("error:", message, file=sys.stderr)
        return 2
    return 0


_COMMANDS = {"train": train.main, "plan": plan.main, "completion": _complete}
_TOLD = """\
python -m jvpipe train --model bert --stages 2           trains as a pipeline over the devices of this machine
python -m jvpipe plan --model bert --size large          plans for hardware that is not here; nothing runs
jvpipe completion bash                                   prints what completes jvpipe there, or in zsh or tcsh
python -m jvpipe train --help, python -m jvpipe plan --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for a user's mistake."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    if words and words[0] not in ("-h", "--help", "--version"):
        print("error:", did_you_mean("command", words[0], list(_COMMANDS)), file=sys.stderr)
        return 2
    print(f"jvpipe {jvpipe.__version__}")
    if words != ["--version"]:
        print(f"\n{_TOLD}\n{names()}")
    return 0
