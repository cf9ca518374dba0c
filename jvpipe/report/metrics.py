"""The numbers of each step, as lines of JSON."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step; steps count from 1, `staleness` is in updates, per layer.

    `swapped_bytes` went to the host; the copies there and back kept devices waiting for `copy_exposed_s`, and took
    `copy_hidden_s` beside their work. `recomputed_s` is spent on what had not been kept. In a search `architecture`
    names the blocks of the model; else it is empty, and left out of the line.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    examples_per_s: float
    bubble_fraction: float
    peak_bytes: Mapping[str, int]
    staleness: tuple[int, ...]
    swapped_bytes: int = 0
    copy_hidden_s: float = 0.0
    copy_exposed_s: float = 0.0
    recomputed_s: float = 0.0
    architecture: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line of JSON; numbers that JSON does not know (NaN, infinities) are null."""
        finite = {k: None if _is_unspeakable(v) else v for k, v in asdict(self).items()}
        if not self.architecture:
            del finite["architecture"]
        return json.dumps(finite, allow_nan=False)


class MetricsLog:
    """Appends a line per step to a file, flushed, so that a killed run keeps all but perhaps the last.

    `resumed_step` is the last step that counts: lines beyond it, made again by the run, are dropped.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        kept = [line for line in read(path) if line["step"] <= resumed_step] if path.exists() else []
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = path.open("a")

    def append(self, metrics: StepMetrics) -> None:
        """Writes one step."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of a metrics file; a line that tells of none, such as one torn by a kill, is left out."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            match json.loads(line):
                case {"step": int()} as told:
                    yield told


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, however the process ends."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, however the process ends."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _is_unspeakable(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
