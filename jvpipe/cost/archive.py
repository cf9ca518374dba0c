"""Measured numbers on disk, beside the compilation cache:
two runs of a command then plan on the same numbers.

What was measured and where is a tuple of texts, the description. The numbers of each description
lie in a file of their own, named by a digest of it: processes do not wait for each other, and a
damaged file is treated as if it did not exist.
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

from jvpipe._jax import Device

FOLDER = "jvpipe-measured"
"""In the folder of the compilation cache."""


@dataclass(frozen=True)
class Archive:
    """Numbers by their descriptions.

    Attributes:
        folder: where they lie; None if nothing is kept.
        again: whether everything is measured again; only files in `since` are read then.
        busy: whether the machine is doing other work, in which case measurements are not kept.
        since: the files that this archive has written.
    """

    folder: Path | None = None
    again: bool = False
    busy: bool = False
    since: set[Path] = field(default_factory=set)

    @staticmethod
    def beside_the_cache(*, again: bool = False, busy: bool = False) -> "Archive":
        """Returns the archive in the folder of the compilation cache, if JAX has one on a local
        disk.
        """
        cache = jax.config.values["jax_compilation_cache_dir"]
        local = cache and "://" not in cache and jax.config.values["jax_enable_compilation_cache"]
        return Archive(Path(cache) / FOLDER if local else None, again, busy)

    def numbers(
        self,
        what: Callable[[], Sequence[str]],
        count: int,
        measure: Callable[[], list[float]],
    ) -> list[float]:
        """Returns the numbers of one description, measured now if none are kept; see `each`."""
        return self.each(lambda _: what(), 1, count, lambda _: [measure()])[0]

    def each(
        self,
        what: Callable[[int], Sequence[str]],
        things: int,
        count: int,
        measure: Callable[[list[int]], Sequence[list[float]]],
    ) -> list[list[float]]:
        """Returns the numbers of several things.

        Numbers that are not kept are measured now, and kept.

        Args:
            what: returns the description of the i-th; it is not called without a folder.
            things: their number; things with equal descriptions are measured once.
            count: how many numbers each has; a file with another count is from another version.
            measure: measures some of them together, given their places.
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
                # Things with equal descriptions leave one entry: they are measured once.
                missing[description] = i
        measured = measure(list(missing.values())) if missing else ()
        for description, numbers in zip(missing, measured, strict=True):
            self.keep(numbers, *description)
            kept[description] = numbers
        return [kept[description] for description in descriptions]

    def find(self, *what: str) -> list[float] | None:
        """Returns the numbers of a description; None if none are kept that can be read."""
        if self.folder is None or (self.again and self._path(what) not in self.since):
            return None
        try:
            kept = json.loads(self._path(what).read_text())
            numbers = [float(x) for x in kept["measured"]]
            digest = kept["digest"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        is_whole = digest == _digest(numbers) and min(numbers, default=0.0) >= 0
        return numbers if is_whole else None

    def keep(self, numbers: Sequence[float], *what: str) -> None:
        """Keeps the numbers of a description; a full or broken disk does not stop the run."""
        if self.folder is None or self.busy:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, suffix=".draft", delete=False) as file:
                json.dump({"measured": list(numbers), "digest": _digest(numbers)}, file)
            # Renaming is atomic: no process ever reads half of a file.
            os.replace(file.name, self._path(what))
            self.since.add(self._path(what))
        except OSError:
            return

    def _path(self, what: Sequence[str]) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return self.folder / f"{digest}.json"


def _digest(numbers: Sequence[float]) -> str:
    """Returns a digest by which numbers that were damaged on disk are recognised."""
    return hashlib.sha256(json.dumps(list(map(float, numbers))).encode()).hexdigest()


def surroundings(device: Device) -> str:
    """Describes what seconds depend on beside the program: kind and number of devices, cores,
    versions, flags.
    """
    cores = (
        os.environ.get("NPROC", ""),
        str(os.cpu_count()),
        os.environ.get("XLA_FLAGS", ""),
    )
    kind = (
        device.platform,
        device.device_kind,
        str(jax.local_device_count(device.platform)),
    )
    return " ".join((*kind, *cores, version("jax"), version("jaxlib")))
