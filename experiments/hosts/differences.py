"""Gives two processes something different: python -m experiments.hosts.differences

Of each of twelve parts process 1 has another one. Both must name it, and leave with the code of
docs/hosts.md. The table has the seconds from their meeting to the word of each: from where they
come to it, or, of what only the traced model shows, from where all have met.
"""

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from experiments.hosts.run import free_port
from jvpipe.cli.shell import ExitCode
from tests.forks import forked

TIMEOUT_S = 10
USUAL = {
    "--model": "experiments.hosts.odd:Odd",
    "--planner": "even",
    "--stages": "2",
    "--microbatches": "4",
    "--batch-size": "8",
    "--steps": "4",
    "--schedule": "1f1b",
    "--seed": "0",
    "--num-processes": "2",
    "--host-timeout": str(TIMEOUT_S),
}


class Part(NamedTuple):
    """What differs: the words that name it, and the option of process 1; without one it is of the
    model.
    """

    word: str
    option: tuple[str, str] | None = None


PARTS = {
    "loss code": Part("the loss is 'equation"),
    "closed-over array": Part("the loss is 'closed-over array 0"),
    "optimizer": Part("the optimizer is 'update: "),
    "its rate": Part("the optimizer is 'update: "),
    "init": Part("parameters is '"),
    "key": Part("--seed is '", ("--seed", "1")),
    "batch size": Part("--batch-size is '", ("--batch-size", "16")),
    "steps": Part("--steps is '", ("--steps", "5")),
    "schedule": Part("--schedule is '", ("--schedule", "gpipe")),
    "stages": Part("--stages is '", ("--stages", "3")),
    "processes": Part("--num-processes is '", ("--num-processes", "3")),
    "secret": Part("secret", ("--secret-file", "1")),
}


class Word(NamedTuple):
    """What a process said of a difference, how long after their meeting, and its exit code."""

    line: str
    took_s: float
    code: int


def words(name: str, folder: Path) -> list[Word]:
    """What both processes say where one part differs.

    Args:
        name: of the part.
        folder: where the run would write.
    """
    part, meet = PARTS[name], {"--coordinator": f"127.0.0.1:{free_port()}"}
    given = USUAL | meet | {"--run-dir": str(folder / "run")}
    if name == "secret":
        given |= {"--secret-file": str(_secret(folder, "0"))}
    other = given | dict([part.option] if part.option else [])
    if name == "secret":
        other |= {"--secret-file": str(_secret(folder, "1"))}
    with ExitStack() as stack:
        started = [
            stack.enter_context(forked(process, odd, *sum(options.items(), ()), "--process-id", i))
            for i, odd, options in (("0", "", given), ("1", name, other))
        ]
        ends = [fork.ended() for fork in started]
    told = [dict(map(json.loads, _spoken(end.stdout))) for end in ends]
    began_s = [max(each.get(moment, 0.0) for each in told) for moment in ("met", "came")]
    met_s = next(s for s in began_s if s)
    return [
        Word(each["word"][1], each["word"][0] - met_s, end.returncode)
        if "word" in each
        else Word(end.stderr[-300:], float("inf"), end.returncode)
        for each, end in zip(told, ends, strict=True)
    ]


def faults(name: str, process: int, word: Word) -> list[str]:
    """What is not as docs/hosts.md promises: who has the right secret, and is alone with it, waits
    for the other.
    """
    alone = name == "secret" and process == 0
    both = alone or all(f"process {i}" in word.line for i in range(2))
    right = {
        "code": word.code == (ExitCode.TRY_AGAIN if alone else ExitCode.MISTAKE),
        "named": PARTS[name].word in word.line and both,
    }
    return [fault for fault, is_right in right.items() if not is_right]


def process(arguments: Sequence[str]) -> int:
    """One process, given its odd part and the options; tells when it came and what it said; returns
    its exit code.
    """
    from jvpipe.cli import train_command

    os.environ["ODD"], *given = arguments
    begin = jax.distributed.initialize

    def initialize(**where: Any) -> None:
        _tell("met", time.monotonic())
        begin(**where)

    _tell("came", time.monotonic())
    met = mock.patch.object(jax.distributed, "initialize", initialize)
    with met, mock.patch.object(sys, "stderr", Heard(sys.stderr)):
        return train_command.main(given)


class Heard(io.TextIOBase):
    """The standard errors of a process; when it speaks of a difference is told too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        if text.startswith(("error: ", "refused ")):
            _tell("word", [time.monotonic(), text])
        return self._inner.write(text)

    def flush(self) -> None:
        self._inner.flush()


def _tell(what: str, value: Any) -> None:
    os.write(1, f"{json.dumps([what, value])}\n".encode())


def _spoken(out: str) -> list[str]:
    """What a process has told, the first word of each kind last."""
    return [line for line in out.splitlines() if line.startswith('["')][::-1]


def _secret(folder: Path, words: str) -> Path:
    path = folder / f"secret-{words}"
    path.write_text(f"{words} is a secret of an experiment")
    path.chmod(0o600)
    return path


def main() -> None:
    """Prints a row per part."""
    os.environ.setdefault("XLA_FLAGS", "")
    print("| what differs | process 0 | process 1 | at fault |\n|---|---|---|---|")
    for name in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            told = words(name, Path(folder))
        wrong = [
            f"process {i}: {word.line!r}" for i, word in enumerate(told) if faults(name, i, word)
        ]
        cells = [f"{word.took_s:.2f} s, code {word.code}" for word in told]
        print(f"| {name} | {cells[0]} | {cells[1]} | {'; '.join(wrong) or 'nothing'} |", flush=True)


if __name__ == "__main__":
    main()
