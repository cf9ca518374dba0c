"""Measured seconds on disk, beside the compilation cache: two runs of one command then decide on the same numbers.

Each number lies in a file of its own, named by a digest of what was measured and where: processes do not wait for each
other, and a file that is damaged is as good as none.
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
    """Numbers by what they are of; without a folder nothing is kept.

    Where all is to be measured again, only what was kept since is looked at. What is measured while others work is not
    kept.
    """

    folder: Path | None = None
    again: bool = False
    busy: bool = False
    since: set[Path] = field(default_factory=set)

    @staticmethod
    def beside_the_cache(*, again: bool = False, busy: bool = False) -> "Archive":
        """In the compilation cache's folder, if JAX was given one on this machine's disk."""
        cache = jax.config.values["jax_compilation_cache_dir"]
        local = cache and "://" not in cache and jax.config.values["jax_enable_compilation_cache"]
        return Archive(Path(cache) / FOLDER if local else None, again, busy)

    def numbers(
        self, what: Callable[[], Sequence[str]], count: int, measure: Callable[[], list[float]]
    ) -> list[float]:
        """The numbers that were kept, or else those measured now, which are kept.

        Args:
            what: says what they are of; asked only if there is a folder.
            count: how many there are; others were not kept by this version.
            measure: is asked where none are kept.
        """
        return self.each(lambda _: what(), 1, count, lambda _: [measure()])[0]

    def each(
        self,
        what: Callable[[int], Sequence[str]],
        things: int,
        count: int,
        measure: Callable[[list[int]], Sequence[list[float]]],
    ) -> list[list[float]]:
        """The numbers of each of several things that were kept, or else are measured now, and kept.

        Args:
            what: says what the numbers of one of them are of; asked only if there is a folder.
            things: how many they are; those with equal descriptions are one.
            count: how many numbers each has; others were not kept by this version.
            measure: measures together those of which none are kept.
        """
        if self.folder is None:
            return list(measure(list(range(things))))
        words = [tuple(what(i)) for i in range(things)]
        kept = {
            one: numbers for one in set(words) if len(numbers := self.find(*one) or []) == count
        }
        missing = {one: i for i, one in enumerate(words) if one not in kept}
        measured = measure(list(missing.values())) if missing else ()
        for one, numbers in zip(missing, measured, strict=True):
            self.keep(numbers, *one)
            kept[one] = numbers
        return [kept[one] for one in words]

    def find(self, *what: str) -> list[float] | None:
        """The numbers that were kept; None if there are none that can be read."""
        if self.folder is None or (self.again and self._path(what) not in self.since):
            return None
        try:
            kept = json.loads(self._path(what).read_text())
            numbers = [float(x) for x in kept["measured"]]
            return (
                numbers
                if kept["digest"] == _digest(numbers) and min(numbers, default=0.0) >= 0
                else None
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, numbers: Sequence[float], *what: str) -> None:
        """Keeps numbers, whole or not at all; a full or broken disk does not stop the run."""
        if self.folder is None or self.busy:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, suffix=".draft", delete=False) as file:
                json.dump({"measured": list(numbers), "digest": _digest(numbers)}, file)
            os.replace(file.name, self._path(what))
            self.since.add(self._path(what))
        except OSError:
            return

    def _path(self, what: Sequence[str]) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()}.json"


def _digest(numbers: Sequence[float]) -> str:
    """Tells numbers that were damaged on the disk from those that were kept."""
    return hashlib.sha256(json.dumps(list(map(float, numbers))).encode()).hexdigest()


def surroundings(device: Device) -> str:
    """Lists what seconds on a device depend on beside the program: its kind and number, cores, versions, flags."""
    cores = os.environ.get("NPROC", ""), str(os.cpu_count()), os.environ.get("XLA_FLAGS", "")
    kind = device.platform, device.device_kind, str(jax.local_device_count(device.platform))
    return " ".join((*kind, *cores, version("jax"), version("jaxlib")))
