"""Keeps measured numbers on disk, so that two runs of a command plan with the same numbers.

A description is a tuple of texts that says what was measured and where. The numbers of each
description have a file of their own, whose name is a digest of the description. If any text
changes, the numbers are measured again. So a description must contain all that its numbers
depend on. A damaged file counts as missing. Processes that share the folder need no locks,
because a file gets its name only when it is complete.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import jax

from jvpipe.util.devices import Device

T = TypeVar("T")
FOLDER = "jvpipe-measured"
"""The archive's folder, inside the folder of JAX's compilation cache."""


@dataclass(frozen=True)
class Archive:
    """A store of numbers by their descriptions.

    Attributes:
        folder: the folder of the files; None if nothing is kept.
        again: whether to ignore files of earlier runs, so that everything is measured again. Files
            that this object has written are still read.
        busy: whether the machine is doing other work; then measurements are not kept.
        since: the files that this object has written.
    """

    folder: Path | None = None
    again: bool = False
    busy: bool = False
    since: set[Path] = field(default_factory=set)

    @staticmethod
    def beside_the_cache(*, again: bool = False, busy: bool = False) -> "Archive":
        """Makes an archive in JAX's compilation cache; it keeps nothing without a local cache."""
        options = jax.config.values
        cache = options["jax_compilation_cache_dir"]
        is_local = cache and "://" not in cache
        is_used = is_local and options["jax_enable_compilation_cache"]
        return Archive(Path(cache) / FOLDER if is_used else None, again, busy)

    def numbers(
        self,
        what: Callable[[], Sequence[str]],
        count: int,
        measure: Callable[[], list[float]],
    ) -> list[float]:
        """Returns the numbers of one thing, as `each` does for several things.

        Args:
            what: returns the description; without a folder it is not called.
            count: how many numbers there are. A file with more or fewer counts as missing.
            measure: measures the numbers.
        """
        found = self.each([""], lambda _: what(), count, lambda lacked: [measure() for _ in lacked])
        return found[0]

    def each(
        self,
        things: Sequence[T],
        what: Callable[[T], Sequence[str]],
        count: int,
        measure: Callable[[Sequence[T]], list[list[float]]],
    ) -> list[list[float]]:
        """Returns the numbers of several things; measures those that the archive lacks.

        Args:
            things: the things. With a folder, things with equal descriptions are measured once;
                without a folder, each thing is measured.
            what: returns the description of a thing; without a folder it is not called.
            count: how many numbers each thing has. A file with more or fewer counts as missing.
            measure: measures some of the things, or none, and returns their numbers in order.
        """
        if self.folder is None:
            return measure(things)
        descriptions = [tuple(what(thing)) for thing in things]
        thing_of = dict(zip(descriptions, things, strict=True))
        numbers = {description: self.find(*description) or [] for description in thing_of}
        lacked = [description for description, found in numbers.items() if len(found) != count]
        measured = measure([thing_of[description] for description in lacked])
        for description, found in zip(lacked, measured, strict=True):
            self.keep(found, *description)
            numbers[description] = found
        return [numbers[description] for description in descriptions]

    def find(self, *what: str) -> list[float] | None:
        """Returns the numbers of a description; None if its file is missing, damaged or ignored."""
        if self.folder is None:
            return None
        path = self.folder / f"{_digest(what)}.json"
        if self.again and path not in self.since:
            return None
        try:
            kept = json.loads(path.read_text())
            numbers = [float(x) for x in kept["measured"]]
            digest = kept["digest"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        is_whole = digest == _digest(numbers) and min(numbers, default=0.0) >= 0
        return numbers if is_whole else None

    def keep(self, numbers: Sequence[float], *what: str) -> None:
        """Keeps the numbers of a description, unless the machine is busy or writing fails."""
        if self.folder is None or self.busy:
            return
        path = self.folder / f"{_digest(what)}.json"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, suffix=".draft", delete=False) as file:
                json.dump({"measured": numbers, "digest": _digest(numbers)}, file)
            # Renaming is atomic, so no process ever reads half of a file.
            os.replace(file.name, path)
            self.since.add(path)


def _digest(values: Sequence[str] | Sequence[float]) -> str:
    """Returns a digest of texts, or of numbers, by which damage on disk is noticed."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def usable_cores() -> int:
    """Returns how many cores this process may use.

    If the system cannot tell (as outside of Linux), all cores of the machine count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def surroundings(device: Device) -> str:
    """Returns what a program's seconds depend on: devices, cores, flags and versions, as a text."""
    parts = (
        device.platform,
        device.device_kind,
        str(jax.local_device_count(device.platform)),
        os.environ.get("NPROC", ""),
        str(usable_cores()),
        os.environ.get("XLA_FLAGS", ""),
        version("jax"),
        version("jaxlib"),
    )
    return " ".join(parts)
