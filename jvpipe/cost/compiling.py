"""The compiler of a target, which runs in a child process and reports the bytes of programs.

A target is a device that programs are compiled for, whether such a device is here or not. Each
program is compiled once. The archive keeps the answer under the text of the program, the target,
the versions of the compiler, and its flags and options. The child process (`compiler_process.py`)
compiles several programs at a time, one per thread.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from jvpipe import _jax
from jvpipe.cost.archive import Archive
from jvpipe.cost.targets import Target

_log = logging.getLogger("jvpipe")
_OTHERS = {
    "cpu": ("--xla_gpu_", "--xla_tpu_"),
    "cuda": ("--xla_cpu_", "--xla_tpu_"),
    "tpu": ("--xla_cpu_", "--xla_gpu_", "--xla_force_host_"),
}
"""By platform, the prefixes of flags that its compiler does not know, and at which it would exit.
"""
_BETWEEN_S = 10.0
"""The least seconds between two lines of the log about progress."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a program that was compiled for an absent device, in place of an executable.

    It has the two members of an executable that the check of memory limits reads.

    Attributes:
        temp_size_in_bytes: bytes that the program needs for itself while it runs.
        each_argument: bytes of each argument in the layout of the device; empty if the compiler
            does not report them.
        each_result: bytes of each result in the layout of the device, or empty.
    """

    temp_size_in_bytes: int
    each_argument: tuple[int, ...] = ()
    each_result: tuple[int, ...] = ()

    @staticmethod
    def of(numbers: Sequence[float]) -> "Sizes":
        """Makes sizes from the numbers that a child sends and the archive keeps.

        The numbers are: five totals, the fourth of which is the bytes of temporaries; the number of
        arguments; and the bytes of each argument and of each result.

        >>> sizes = Sizes.of([8.0, 4.0, 0.0, 2.0, 1.0, 2.0, 4.0, 4.0, 4.0])
        >>> sizes.temp_size_in_bytes, sizes.each_argument, sizes.each_result
        (2, (4, 4), (4,))
        """
        _, _, _, temporary, _, count, *arrays = map(int, numbers)
        return Sizes(temporary, tuple(arrays[:count]), tuple(arrays[count:]))

    def memory_analysis(self) -> "Sizes":
        """Returns an object with `temp_size_in_bytes`, as this method of an executable does."""
        return self


class Refusal(ValueError):  # noqa: N818 - it is the compiler's word
    """The refusal of a program by a target's compiler.

    Attributes:
        text: the program.
    """

    def __init__(self, target: Target, text: str, line: str) -> None:
        super().__init__(f"the compiler for {target.name} says: {line}")
        self.text = text


@dataclass(frozen=True)
class _Child:
    """A child process that compiles.

    Attributes:
        target: the target that the child compiles for.
        process: the process of the child, which reads messages and writes answers.
        complaints: a file with the error stream of the child.
    """

    target: Target
    process: subprocess.Popen[bytes]
    complaints: IO[bytes]

    def say(self, message: dict[str, Any], text: bytes = b"") -> None:
        """Sends a message as one line of JSON, and a text after it."""
        # If the child has ended, `answer` raises the error, with the reason.
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n" + text)
            self.process.stdin.flush()

    def give(self, number: int, program: str) -> None:
        """Sends a program to compile."""
        text = program.encode()
        self.say({"id": number, "bytes": len(text)}, text)

    def answer(self) -> dict[str, Any]:
        """Reads the next answer.

        Raises:
            ValueError: the child has ended.
        """
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        self.complaints.seek(0)
        complaints = self.complaints.read().decode(errors="replace")
        last = complaints.strip().splitlines()[-1:]
        said = f": {last[0]}" if last else ""
        raise ValueError(f"the compiler for {self.target.name} ended (exit code {code}){said}")


@dataclass
class Compiler:
    """The compiler of a target.

    A child process starts only if an answer is neither remembered nor in the archive.

    Attributes:
        target: the target that it compiles for.
        archive: the archive of its answers.
        asked: how many programs child processes have compiled so far.
    """

    target: Target
    archive: Archive = field(default_factory=Archive)
    asked: int = 0
    _said: dict[tuple[str, ...], list[float]] = field(default_factory=dict, repr=False)

    def sizes(self, texts: Sequence[str]) -> list[Sizes]:
        """Returns the sizes of programs.

        Args:
            texts: the programs, in StableHLO.

        Raises:
            Refusal: the compiler refuses one of the programs.
            ValueError: the compiler cannot be asked; the message says why.
        """
        target = self.target
        target.check()
        said = self._said
        flags = _flags(target.platform), os.environ.get("LIBTPU_INIT_ARGS", "")
        exact = map(str, chain(*_jax.exact(target.platform).items()))
        common = "compiled bytes of each", *target.identity, *flags, *exact
        words_of = {text: (*common, text) for text in texts}
        for words in words_of.values():
            said[words] = said.get(words) or self.archive.find(*words) or []
        missing = [text for text, words in words_of.items() if not said[words]]
        # A child takes seconds to start, so none starts without a program to compile.
        if missing:
            for text, numbers in self._compiled(missing):
                self.archive.keep(numbers, *words_of[text])
                said[words_of[text]] = numbers
        return [Sizes.of(said[words_of[text]]) for text in texts]

    def _compiled(self, texts: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
        """Yields each program with its numbers, in the order of the child's answers."""
        waiting = enumerate(texts)
        told_s = time.monotonic()
        # Answers come in any order; the id of each is the index of its program in `texts`.
        with _child(self.target) as child:
            # The child gets one program per thread at first, and another one for each answer.
            for number, text in islice(waiting, os.cpu_count()):
                child.give(number, text)
            for done in range(1, len(texts) + 1):
                answer = child.answer()
                index: int = answer["id"]
                text = texts[index]
                if "refused" in answer:
                    raise Refusal(self.target, text, answer["refused"])
                for number, another in islice(waiting, 1):
                    child.give(number, another)
                self.asked += 1
                if time.monotonic() - told_s > _BETWEEN_S:
                    told_s = time.monotonic()
                    _log.info("compiled %d of %d for %s", done, len(texts), self.target.name)
                yield text, list(map(float, answer["numbers"]))


@cache
def compiler_of(target: Target, folder: Path | None) -> Compiler:
    """Returns the compiler of a target and folder; calls with equal arguments share one object.

    Args:
        target: the target that it compiles for.
        folder: the folder of the archive; None to remember answers in this process alone.
    """
    return Compiler(target, Archive(folder))


def _flags(platform: str) -> str:
    """Returns the flags of the environment, without flags of other platforms."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = _OTHERS.get(platform, ())
    return " ".join(flag for flag in flags if not flag.startswith(others))


@contextmanager
def _child(target: Target) -> Iterator[_Child]:
    """Starts a child that compiles for a target, and ends it at the end of the `with` block."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # the child compiles for other devices, but must not use them
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so several processes may compile
        "XLA_FLAGS": _flags(target.platform),
    }
    with TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "jvpipe.cost.compiler_process"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        child = _Child(target, process, complaints)
        try:
            names = "platform", "topology", "config"
            child.say({name: getattr(target, name) for name in names})
            if refused := child.answer().get("refused"):
                raise ValueError(f"the compiler for {target.name} does not start: {refused}")
            yield child
        finally:
            process.kill()
            process.communicate()
