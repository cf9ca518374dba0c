"""The metrics of each step, and the file of JSON lines that keeps them."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jvpipe.util.brief import brief
from jvpipe.util.paths import path_names
from jvpipe.util.replaced_file import replace_text
from jvpipe.util.sizes import MOST_S


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step. Some of the names have these meanings:

        step               counts from 1
        peak_bytes         the most bytes on each device
        staleness          in updates, for each layer
        swapped_bytes      copied to the host
        copy_exposed_s     seconds of copies to the host and back for which devices waited
        copy_hidden_s      the other seconds of these copies
        recomputed_s       seconds of recomputing values that were not kept
        busy_fraction      the share of the step in which each device worked
        elapsed_s          seconds of training so far, with evaluations and checkpoints, over all
                           starts of the run

    A metric that a run does not have is left out of the step's line:

        tokens_per_s       if the batch has no leaf of tokens
        mfu                (`jvpipe.cost.utilization`) if the peak rate of a device is unknown
        held_out_loss      if there was no evaluation after the step
        aux                (scalars by name) if the loss returns none
        architecture       (the names of the model's blocks) outside of a search
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
        # A loss of 0 is a metric, but an empty mapping is not.
        absent = (None, (), {})
        return {name: value for name, value in asdict(self).items() if value not in absent}

    def numbers(self) -> dict[str, int | float]:
        """Returns all numbers by name; entries of a mapping have names such as aux/accuracy.

        The staleness is the largest of all layers.
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
    """Returns a tree's scalars by their paths; if the tree is itself a scalar, its name is aux.

    >>> scalars_in({"accuracy": np.float32(0.5), "logits": np.zeros(3)})
    {'accuracy': 0.5}
    """
    # A None in place of an array leaves only the scalars in the tree.
    scalars = jax.tree.map(lambda leaf: float(leaf) if np.shape(leaf) == () else None, tree)
    # The path of a tree that is a single leaf is empty.
    names = [name or "aux" for name in path_names(scalars)]
    return dict(zip(names, jax.tree.leaves(scalars), strict=True))


class MetricsLog:
    """A file to which each step appends a line.

    Each line is flushed, so a killed run loses at most its last line. `elapsed_s` has the seconds
    of the run up to `resumed_step`.

    Args:
        path: the file.
        resumed_step: the step after which the run continues. Lines of later steps are dropped,
            because the run repeats these steps.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        lines = read_steps(path) if path.exists() else ()
        kept = [line for line in lines if line["step"] <= resumed_step]
        self.elapsed_s = _elapsed_s(path, kept[-1]) if kept else 0.0
        # The lines of later steps are dropped here.
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_text(path, text)
        self._file = path.open("a")

    def append(self, metrics: StepMetrics) -> None:
        """Appends the line of a step."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file; skips other lines, such as an incomplete last line."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and type(metrics.get("step")) is int:
                yield metrics


def _elapsed_s(path: Path, line: Mapping[str, Any]) -> float:
    """Returns the `elapsed_s` of a line of a metrics file; 0 if it has none."""
    elapsed_s = line.get("elapsed_s")
    if elapsed_s is None:
        return 0.0
    if type(elapsed_s) not in (int, float) or not 0 <= elapsed_s < MOST_S:
        raise ValueError(
            f"{path}: elapsed_s of step {brief(line['step'])} is {brief(elapsed_s)}, and should be "
            "a number of seconds: put it right, or take it out"
        )
    return float(elapsed_s)


def _speakable(value: Any) -> Any:
    """Replaces numbers that are not finite by None, in a value or in nested mappings."""
    if isinstance(value, Mapping):
        return {name: _speakable(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
