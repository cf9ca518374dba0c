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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

import jax

from jvpipe.util.devices import Device

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
        cache = jax.config.values["jax_compilation_cache_dir"]
        is_on = jax.config.values["jax_enable_compilation_cache"]
        is_local = cache and "://" not in cache
        folder = Path(cache) / FOLDER if is_local and is_on else None
        return Archive(folder, again, busy)

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
        return self.each(lambda _: what(), 1, count, lambda _: [measure()])[0]

    def each(
        self,
        what: Callable[[int], Sequence[str]],
        things: int,
        count: int,
        measure: Callable[[list[int]], Sequence[list[float]]],
    ) -> list[list[float]]:
        """Returns the numbers of several things; measures those that the archive lacks.

        Args:
            what: returns the description of thing i; without a folder it is not called.
            things: how many things there are. With a folder, things with equal descriptions are
                measured once; without a folder, each thing is measured.
            count: how many numbers each thing has. A file with more or fewer counts as missing.
            measure: measures the things with the given indices, and returns their numbers in order.
        """
        if self.folder is None:
            return list(measure(list(range(things))))
        descriptions = [tuple(what(i)) for i in range(things)]
        kept: dict[tuple[str, ...], list[float]] = {}
        missing: dict[tuple[str, ...], int] = {}
        for i, description in enumerate(descriptions):
            numbers = self.find(*description)
            if numbers is not None and len(numbers) == count:
                kept[description] = numbers
            else:
                # Things with equal descriptions share one entry, so they are measured once.
                missing[description] = i
        measured = measure(list(missing.values())) if missing else ()
        for description, numbers in zip(missing, measured, strict=True):
            self.keep(numbers, *description)
            kept[description] = numbers
        return [kept[description] for description in descriptions]

    def find(self, *what: str) -> list[float] | None:
        """Returns the numbers of a description; None if its file is missing, damaged or ignored."""
        if self.folder is None:
            return None
        path = self._path(what)
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, suffix=".draft", delete=False) as file:
                json.dump({"measured": list(numbers), "digest": _digest(numbers)}, file)
            # Renaming is atomic, so no process ever reads half of a file.
            os.replace(file.name, self._path(what))
            self.since.add(self._path(what))
        except OSError:
            return

    def _path(self, what: Sequence[str]) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return self.folder / f"{digest}.json"


def _digest(numbers: Sequence[float]) -> str:
    """Returns a digest of numbers, by which damage on disk is noticed."""
    return hashlib.sha256(json.dumps(list(map(float, numbers))).encode()).hexdigest()


def usable_cores() -> int:
    """Returns how many cores this process may use.

    If the system cannot tell (as outside of Linux), all cores of the machine count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def surroundings(device: Device) -> str:
    """Returns what a program's seconds depend on: devices, cores, flags and versions, as a text."""
    cores = (
        os.environ.get("NPROC", ""),
        str(usable_cores()),
        os.environ.get("XLA_FLAGS", ""),
    )
    kind = (
        device.platform,
        device.device_kind,
        str(jax.local_device_count(device.platform)),
    )
    return " ".join((*kind, *cores, version("jax"), version("jaxlib")))
