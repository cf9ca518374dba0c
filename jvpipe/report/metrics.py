"""The metrics of each step, and the file of JSON lines that keeps them."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jvpipe.util.brief import brief
from jvpipe.util.paths import path_names
from jvpipe.util.sizes import MOST_S


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step.

    Steps count from 1. `staleness` is in updates, for each layer. `swapped_bytes` were copied to
    the host. For `copy_exposed_s` seconds devices waited for the copies to the host and back; for
    `copy_hidden_s` the copies ran while devices worked. `recomputed_s` counts the recomputing of
    values that were not kept. `busy_fraction` is the share of the step in which each device worked.
    `elapsed_s` is the time of training so far, with evaluations and checkpoints, over all starts of
    the run.

    Metrics that a run does not have are left out of the line. These are `tokens_per_s` if the batch
    has no leaf of tokens, `mfu` (see `jvpipe.cost.utilisation`) if the peak of a device is unknown,
    `held_out_loss` if there was no evaluation after the step, `aux` (scalars by name) if the loss
    returns none, and `architecture` (the names of the model's blocks) outside of a search.
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
    elapsed_s: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    held_out_loss: float | None = None
    aux: Mapping[str, float] = field(default_factory=dict)
    architecture: tuple[str, ...] = ()
    busy_fraction: Mapping[str, float] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Returns the metrics that the run has, by name."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value not in ((), {})
        }

    def numbers(self) -> dict[str, int | float]:
        """Returns all numbers by name, with names NAME/KEY for entries of mappings.

        For staleness, this is the largest of all layers.
        """
        numbers: dict[str, int | float] = {}
        for name, value in self.told().items():
            match value:
                case int() | float():
                    numbers[name] = value
                case Mapping():
                    numbers |= {f"{name}/{key}": number for key, number in value.items()}
                case tuple() if name == "staleness":
                    numbers[name] = max(value)
        return numbers

    def to_json(self) -> str:
        """Returns a line of JSON, with null for NaN and infinities."""
        # JSON has no NaN or infinities; Python writes them, but other readers refuse them.
        return json.dumps(_speakable(self.told()), allow_nan=False)


def scalars_in(tree: Any) -> Mapping[str, float]:
    """Returns the scalars of a tree by their paths; if the tree is a scalar, its name is aux.

    >>> scalars_in({"accuracy": np.float32(0.5), "logits": np.zeros(3)})
    {'accuracy': 0.5}
    """
    leaves = [
        (path, leaf) for path, leaf in jax.tree.leaves_with_path(tree) if np.shape(leaf) == ()
    ]
    names = path_names([path for path, _ in leaves])
    return {name or "aux": float(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


class MetricsLog:
    """A file to which each step appends a line, flushed at once: a kill loses at most the last.

    `resumed_step` is the step from which the run goes on. Lines of later steps are dropped, because
    the run makes these steps again. `elapsed_s` is that of the last line that is kept.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        kept = (
            [line for line in read_steps(path) if line["step"] <= resumed_step]
            if path.exists()
            else []
        )
        self.elapsed_s = _elapsed_s(path, kept[-1]) if kept else 0.0
        # Only the kept lines are written; the resumed run writes the later ones again.
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = path.open("a")

    def append(self, metrics: StepMetrics) -> None:
        """Appends the line of a step."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file; skips other lines, such as one torn by a kill."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and type(metrics.get("step")) is int:
                yield metrics


def _elapsed_s(path: Path, line: Mapping[str, Any]) -> float:
    """Returns the seconds of a run up to a line; 0 if the line does not have them."""
    elapsed_s = line.get("elapsed_s")
    if elapsed_s is None:
        return 0.0
    if type(elapsed_s) not in (int, float) or not 0 <= elapsed_s < MOST_S:
        wrong = f"{path}: elapsed_s of step {brief(line['step'])} is {brief(elapsed_s)}"
        raise ValueError(
            f"{wrong}, and should be a number of seconds: put it right, or take it out"
        )
    return float(elapsed_s)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file by a text; however the process ends, the file is the old or the new one."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file by bytes; however the process ends, the file is the old or the new one."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        # The content is forced to the disk before the rename, in case the machine stops.
        os.fsync(file.fileno())
    draft.replace(path)


def _speakable(value: Any) -> Any:
    """Returns a value with None for numbers that are not finite, also inside of mappings."""
    if isinstance(value, Mapping):
        return {name: _speakable(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
