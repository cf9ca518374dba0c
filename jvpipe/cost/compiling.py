"""A target's compiler, asked how many bytes programs take: in a child process, once for each program.

What it has said lies in the archive, by the text of the program, the target, its versions and flags.
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
"""How flags begin that are of other platforms: a compiler that does not know a flag ends."""
_BETWEEN_S = 10.0
"""So often it is told how far the compiler is."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a compiled program: its arguments and results as they lie on the device, `aliased` both at once.

    `each_argument` and `each_result` are those of one array each, if the compiler reports them.
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
        """All of it in a row, as the archive keeps it."""
        totals = self.arguments, self.results, self.aliased, self.temporary, self.code
        return [
            float(x)
            for x in (*totals, len(self.each_argument), *self.each_argument, *self.each_result)
        ]

    @staticmethod
    def of(numbers: Sequence[float]) -> "Sizes":
        """What such a row of numbers says.

        >>> sizes = Sizes(8, 4, 0, 2, 1, (4, 4), (4,))
        >>> Sizes.of(sizes.numbers) == sizes
        True
        """
        arguments, results, aliased, temporary, code, count, *argument_sizes = map(int, numbers)
        apart = tuple(argument_sizes[:count]), tuple(argument_sizes[count:])
        return Sizes(arguments, results, aliased, temporary, code, *apart)


class Refusal(ValueError):  # noqa: N818 - it is the compiler's word
    """The target's compiler does not take a program; `line` is its word."""

    def __init__(self, target: Target, text: str, line: str) -> None:
        super().__init__(f"the compiler for {target.name} says: {line}")
        self.text, self.line = text, line


@dataclass(frozen=True)
class _Child:
    """A compiler at work: where programs go, where its words come from, and what it complains of."""

    target: Target
    process: subprocess.Popen[bytes]
    to: IO[bytes]
    words: IO[bytes]
    complaints: IO[bytes]

    def say(self, message: dict[str, Any], text: bytes = b"") -> None:
        """Sends a line, and a text after it; one that has ended is heard of by its answer."""
        with suppress(BrokenPipeError):
            self.to.write(json.dumps(message).encode() + b"\n" + text)
            self.to.flush()

    def give(self, number: int, program: str) -> None:
        """Gives it a program to compile."""
        text = program.encode()
        self.say({"id": number, "bytes": len(text)}, text)

    def answer(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            ValueError: it has ended.
        """
        if line := self.words.readline():
            return json.loads(line)
        code = self.process.wait()
        self.complaints.seek(0)
        last = self.complaints.read().decode(errors="replace").strip().splitlines()[-1:]
        said = f": {last[0]}" if last else ""
        raise ValueError(f"the compiler for {self.target.name} ended (exit code {code}){said}")


@dataclass
class Compiler:
    """The compiler of a target. Its process begins with the first program that the archive does not know."""

    target: Target
    archive: Archive = field(default_factory=Archive)
    asked: int = 0  # programs that were compiled: nothing was known of them
    _said: dict[tuple[str, ...], list[float]] = field(default_factory=dict, repr=False)

    def sizes(self, texts: Sequence[str]) -> list[Sizes]:
        """What programs take.

        Args:
            texts: of the programs, in StableHLO.

        Raises:
            Refusal: the compiler does not take one of them.
            ValueError: the compiler cannot be asked, and why.
        """
        self.target.check()
        size_of = {text: self._known(text) for text in dict.fromkeys(texts)}
        missing = [text for text, numbers in size_of.items() if numbers is None]
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
        """Yields what the child says, as it says it; it is given no more than it can work at."""
        waiting = iter(enumerate(texts))
        told_s = time.monotonic()
        with _child(self.target) as child:
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
                    _log.info("compiled %d of %d for %s", done, len(texts), self.target.name)
                argument_sizes = answer["arguments"]
                numbers = *answer["sizes"], len(argument_sizes), *argument_sizes, *answer["results"]
                yield text, list(map(float, numbers))


@cache
def compiler_of(target: Target, folder: Path | None) -> Compiler:
    """The compiler of a target, which remembers what it has said: in a folder, else as long as this process lives."""
    return Compiler(target, Archive(folder))


def _flags(platform: str) -> str:
    """The flags that the compiler of a platform may know."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if not flag.startswith(_OTHERS.get(platform, ())))


@contextmanager
def _child(target: Target) -> Iterator[_Child]:
    """A child that compiles for a target."""
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
        child = _Child(target, process, process.stdin, process.stdout, complaints)
        try:
            child.say({name: getattr(target, name) for name in ("platform", "topology", "config")})
            if refused := child.answer().get("refused"):
                raise ValueError(f"the compiler for {target.name} does not start: {refused}")
            yield child
        finally:
            process.kill()
            process.communicate()
