"""The numbers of each step, as lines of JSON."""

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
    """The metrics of one step; steps count from 1, `staleness` is in updates, per layer.

    `swapped_bytes` went to the host; the copies there and back kept devices waiting for
    `copy_exposed_s`, and took `copy_hidden_s` beside their work. `recomputed_s` is spent on what
    had not been kept. `busy_fraction` is the share of the step that each device worked. `elapsed_s`
    is the time since the run began to train, evaluations and checkpoints included, over all its
    starts.

    What there is not is left out of the line: `tokens_per_s` where the batch tells no tokens, `mfu`
    (see `jvpipe.cost.utilisation`) where the peak of a device is not known, `held_out_loss` where
    nothing was evaluated after the step, `aux` (scalars by name) where the loss returns none,
    `architecture` (the names of the model's blocks) where none is searched.
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
        """Returns the metrics that there are, by name."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value not in ((), {})
        }

    def numbers(self) -> dict[str, int | float]:
        """Returns all numbers by name; those of a device or of aux as NAME/KEY, of staleness the largest."""
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
        """Writes a line of JSON; numbers that JSON does not know (NaN, infinities) are null."""
        # Other readers of JSON refuse NaN and infinities.
        return json.dumps(_speakable(self.told()), allow_nan=False)


def scalars_in(tree: Any) -> Mapping[str, float]:
    """Returns the single numbers of a tree by their path; one that is the whole tree is called aux.

    >>> scalars_in({"accuracy": np.float32(0.5), "logits": np.zeros(3)})
    {'accuracy': 0.5}
    """
    leaves = [
        (path, leaf) for path, leaf in jax.tree.leaves_with_path(tree) if np.shape(leaf) == ()
    ]
    names = path_names([path for path, _ in leaves])
    return {name or "aux": float(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


class MetricsLog:
    """Appends a line per step to a file, flushed, so that a killed run keeps all but perhaps the last.

    `resumed_step` is the last step that counts: lines beyond it, made again by the run, are
    dropped. `elapsed_s` is that of the last line that is kept.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        kept = (
            [line for line in read_steps(path) if line["step"] <= resumed_step]
            if path.exists()
            else []
        )
        self.elapsed_s = _elapsed_s(path, kept[-1]) if kept else 0.0
        # Lines after the checkpoint are made again by the resumed run.
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


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file.

    Lines that hold none, such as one torn by a kill, are left out.
    """
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and type(metrics.get("step")) is int:
                yield metrics


def _elapsed_s(path: Path, line: Mapping[str, Any]) -> float:
    """Returns the seconds of a run up to a line; 0 where it does not tell them."""
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
    """Writes a file whole or not at all, however the process ends."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, however the process ends."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        # On disk before the name points to it, also if the machine stops.
        os.fsync(file.fileno())
    draft.replace(path)


def _speakable(value: Any) -> Any:
    """Replaces numbers that are not finite by None, also inside."""
    if isinstance(value, Mapping):
        return {name: _speakable(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
