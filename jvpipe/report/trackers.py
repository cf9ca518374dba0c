"""Trackers: where the metrics of a run go beside metrics.jsonl, TensorBoard and Weights & Biases."""

import importlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jvpipe.ir.extras import extra
from jvpipe.ir.names import did_you_mean


class Tracker(Protocol):
    """What is told the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Takes the numbers of a step, which counts from 1."""
        ...

    def close(self) -> None:
        """Writes what is not written yet; nothing follows."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it: its folder, its options, and how many steps it had when it was begun or resumed."""

    folder: Path
    config: Mapping[str, Any]
    first_step: int = 0


class TensorBoard:
    """Writes event files to the folder `tensorboard` of the run; what a killed run had logged beyond is purged.

    TensorBoard's names have no colon: peak_bytes/cpu:0 is peak_bytes/cpu_0.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("tensorboard"):
            from tensorboardX import SummaryWriter
        purged = run.first_step + 1 if run.first_step else None
        begun = f".from-{run.first_step}"  # no two starts have one name
        self._writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=purged, filename_suffix=begun
        )

    def log(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Takes the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name.replace(":", "_"), value, step)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class WeightsAndBiases:
    """Sends to Weights & Biases as wandb's own settings say: WANDB_MODE=offline keeps it in the run's folder `wandb`.

    A resumed run has the id that it had, which is in the file `wandb.id`.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("wandb"):
            import wandb
        named = run.folder / "wandb.id"
        if not named.exists():
            named.write_text(uuid.uuid4().hex[:8])
        given = {
            "project": "jvpipe",
            "name": run.folder.name,
            "dir": str(run.folder),
            "config": dict(run.config),
        }
        settings = wandb.Settings(silent=True, console="off")
        try:
            self._run = wandb.init(**given, id=named.read_text(), resume="allow", settings=settings)
        except wandb.Error as problem:
            reason = str(problem).splitlines()[0].rstrip(".")
            raise ValueError(
                f"--track wandb: {reason}; WANDB_MODE=offline keeps the metrics on this disk"
            ) from problem

    def log(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Takes the numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until all is written or sent."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""By the names that `--track` takes, which are those of their extras."""
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_tracker(name: str) -> None:
    """Sees whether there is such a tracker here.

    Raises:
        ValueError: it is unknown, or not installed.

    >>> check_tracker("tensorbord")
    Traceback (most recent call last):
    ValueError: unknown tracker 'tensorbord': did you mean 'tensorboard'? There are tensorboard, wandb
    """
    if name not in TRACKERS:
        raise ValueError(did_you_mean("tracker", name, list(TRACKERS)))
    with extra(name):
        importlib.import_module(_PACKAGES[name])
