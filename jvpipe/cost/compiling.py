"""A target's compiler, which tells the bytes of programs: it runs in a child process,
once for each program.

Its answers lie in the archive, by the text of the program, the target, its versions and flags. The
child is `compiler_process.py`; several programs are on their way at once, as many as it has
threads.
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
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from jvpipe.cost.archive import Archive
from jvpipe.cost.targets import Target

_log = logging.getLogger("jvpipe")
_OTHERS = {
    "cpu": ("--xla_gpu_", "--xla_tpu_"),
    "cuda": ("--xla_cpu_", "--xla_tpu_"),
    "tpu": ("--xla_cpu_", "--xla_gpu_", "--xla_force_host_"),
}
"""The beginnings of flags for other platforms: a compiler exits if it does not know a flag."""
_BETWEEN_S = 10.0
"""Seconds between two lines of the log about the progress."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a compiled program.

    Attributes:
        arguments: as they lie on the device.
        results: as they lie on the device.
        aliased: of results that lie where arguments were.
        temporary: that it needs while it runs.
        code: of the program itself.
        each_argument: of each argument, if the compiler reports them.
        each_result: of each result, if the compiler reports them.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int
    each_argument: tuple[int, ...] = ()
    each_result: tuple[int, ...] = ()

    @property
    def numbers(self) -> list[float]:
        """All of it in a row, as the archive keeps it: totals, the number of arguments, sizes of
        arrays.
        """
        totals = self.arguments, self.results, self.aliased, self.temporary, self.code
        arrays = (*self.each_argument, *self.each_result)
        return [float(x) for x in (*totals, len(self.each_argument), *arrays)]

    @staticmethod
    def of(numbers: Sequence[float]) -> "Sizes":
        """Makes sizes of the numbers of `Sizes.numbers`.

        >>> sizes = Sizes(8, 4, 0, 2, 1, (4, 4), (4,))
        >>> Sizes.of(sizes.numbers) == sizes
        True
        """
        arguments, results, aliased, temporary, code, count, *argument_sizes = map(int, numbers)
        apart = tuple(argument_sizes[:count]), tuple(argument_sizes[count:])
        return Sizes(
            arguments,
            results,
            aliased,
            temporary,
            code,
            *apart,
        )


class Refusal(ValueError):  # noqa: N818 - it is the compiler's word
    """A target's compiler refuses a program; `text` is the program, `line` the compiler's message."""

    def __init__(self, target: Target, text: str, line: str) -> None:
        super().__init__(f"the compiler for {target.name} says: {line}")
        self.text, self.line = text, line


@dataclass(frozen=True)
class _Child:
    """A compiler at work.

    Attributes:
        target: that it compiles for.
        process: of the child.
        to: the child's input.
        words: its answers.
        complaints: its error stream, a file.
    """

    target: Target
    process: subprocess.Popen[bytes]
    to: IO[bytes]
    words: IO[bytes]
    complaints: IO[bytes]

    def say(self, message: dict[str, Any], text: bytes = b"") -> None:
        """Sends a line, and a text after it."""
        # A child that has ended is noticed when its answer is read.
        with suppress(BrokenPipeError):
            self.to.write(json.dumps(message).encode() + b"\n" + text)
            self.to.flush()

    def give(self, number: int, program: str) -> None:
        """Sends a program to compile."""
        text = program.encode()
        self.say({"id": number, "bytes": len(text)}, text)

    def answer(self) -> dict[str, Any]:
        """Reads the next answer.

        Raises:
            ValueError: the child has ended.
        """
        if line := self.words.readline():
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

    A child starts when there are programs that the archive does not know.

    Attributes:
        target: that it compiles for.
        archive: of its answers.
        asked: the number of programs that were compiled and not found in the archive.
    """

    target: Target
    archive: Archive = field(default_factory=Archive)
    asked: int = 0
    _said: dict[tuple[str, ...], list[float]] = field(default_factory=dict, repr=False)

    def sizes(self, texts: Sequence[str]) -> list[Sizes]:
        """Returns the sizes of programs.

        Args:
            texts: of the programs, in StableHLO.

        Raises:
            Refusal: the compiler refuses one of them.
            ValueError: the compiler cannot be asked; the message says why.
        """
        self.target.check()
        size_of = {text: self._known(text) for text in dict.fromkeys(texts)}
        missing = [text for text, numbers in size_of.items() if numbers is None]
        # A child takes seconds to start, so it starts only if it has something to compile.
        if missing:
            for text, numbers in self._compiled(missing):
                self.archive.keep(numbers, *self._words(text))
                size_of[text] = self._said[self._words(text)] = numbers
        return [Sizes.of(size_of[text] or ()) for text in texts]

    def _known(self, text: str) -> list[float] | None:
        words = self._words(text)
        return self._said.get(words) or self.archive.find(*words)

    def _words(self, text: str) -> tuple[str, ...]:
        flags = _flags(self.target.platform), os.environ.get("LIBTPU_INIT_ARGS", "")
        return "compiled bytes of each", *self.target.identity, *flags, text

    def _compiled(self, texts: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
        """Yields each program with its numbers, in the order of the child's answers."""
        waiting = iter(enumerate(texts))
        told_s = time.monotonic()
        # Answers come in any order; the id of each is the place of its program in `texts`.
        with _child(self.target) as child:
            # One program per thread of the child, and another for each answer.
            for number, text in islice(waiting, os.cpu_count()):
                child.give(number, text)
            for done in range(1, len(texts) + 1):
                answer = child.answer()
                place: int = answer["id"]
                text = texts[place]
                if "refused" in answer:
                    raise Refusal(self.target, text, answer["refused"])
                for number, another in islice(waiting, 1):
                    child.give(number, another)
                self.asked += 1
                if time.monotonic() - told_s > _BETWEEN_S:
                    told_s = time.monotonic()
                    _log.info(
                        "compiled %d of %d for %s",
                        done,
                        len(texts),
                        self.target.name,
                    )
                argument_sizes = answer["arguments"]
                numbers = (
                    *answer["sizes"],
                    len(argument_sizes),
                    *argument_sizes,
                    *answer["results"],
                )
                yield text, list(map(float, numbers))


@cache
def compiler_of(target: Target, folder: Path | None) -> Compiler:
    """Returns the compiler of a target, which remembers its answers.

    Args:
        target: that it compiles for.
        folder: of the archive; None if answers are remembered for this process alone.
    """
    return Compiler(target, Archive(folder))


def _flags(platform: str) -> str:
    """Returns the flags of the environment without those of other platforms."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if not flag.startswith(_OTHERS.get(platform, ())))


@contextmanager
def _child(target: Target) -> Iterator[_Child]:
    """Starts a child that compiles for a target, and ends it."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # it has no devices but these, and compiles for others
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is touched: several may compile at once
        "XLA_FLAGS": _flags(target.platform),
    }
    command = [sys.executable, "-m", "jvpipe.cost.compiler_process"]
    with TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        assert process.stdin
        assert process.stdout
        child = _Child(
            target,
            process,
            process.stdin,
            process.stdout,
            complaints,
        )
        try:
            child.say({name: getattr(target, name) for name in ("platform", "topology", "config")})
            if refused := child.answer().get("refused"):
                raise ValueError(f"the compiler for {target.name} does not start: {refused}")
            yield child
        finally:
            process.kill()
            process.communicate()
