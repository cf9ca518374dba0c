"""Trackers, where the metrics of a run go: TensorBoard, Weights & Biases, MLflow, trackio, and those of packages."""

import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import jax

from jvpipe.report.metrics import scalars_in
from jvpipe.util.extras import extra
from jvpipe.util.names import did_you_mean

Numbers = Mapping[str, int | float]
"""The metrics of a step that are numbers, by name."""


class Tracker(Protocol):
    """What is told the metrics of each step."""

    def log(self, step: int, metrics: Numbers) -> None:
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

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name.replace(":", "_"), value, step)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class _Sent:
    """A tracker whose package has a run that takes the metrics of a step by name."""

    _run: Any

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until all is written or sent."""
        self._run.finish()


class WeightsAndBiases(_Sent):
    """Sends to Weights & Biases as wandb's own settings say: WANDB_MODE=offline keeps it in the run's folder `wandb`.

    A resumed run has the id that it had, which is in the file `wandb.id`.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("wandb"):
            import wandb
        named = run.folder / "wandb.id"
        # A resumed run goes on under the id of the run before.
        if not named.exists():
            named.write_text(uuid.uuid4().hex[:8])
        options = {
            "project": "jvpipe",
            "name": run.folder.name,
            "dir": str(run.folder),
            "config": dict(run.config),
        }
        settings = wandb.Settings(silent=True, console="off")
        try:
            self._run = wandb.init(
                **options, id=named.read_text(), resume="allow", settings=settings
            )
        except wandb.Error as problem:
            reason = str(problem).splitlines()[0].rstrip(".")
            raise ValueError(
                f"--track wandb: {reason}; WANDB_MODE=offline keeps the metrics on this disk"
            ) from problem


class MLflow:
    """Sends to MLflow as its own settings say (MLFLOW_TRACKING_URI), else to a database in the run's folder.

    A resumed run has the id that it had, which is in the file `mlflow.id`.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("mlflow"):
            mlflow = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        here = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self._client: Any = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
        named = run.folder / "mlflow.id"
        if not named.exists():
            found = self._client.get_experiment_by_name(_PROJECT)
            where = found.experiment_id if found else self._client.create_experiment(_PROJECT)
            begun = self._client.create_run(where, run_name=run.folder.name)
            named.write_text(begun.info.run_id)
            for name, value in run.config.items():
                self._client.log_param(begun.info.run_id, name, value)
        self._id = named.read_text()

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step."""
        now_ms = int(time.time() * 1000)
        sent = [self._metric(name, float(x), now_ms, step) for name, x in metrics.items()]
        self._client.log_batch(self._id, metrics=sent)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id)


class Trackio(_Sent):
    """Sends to trackio as its own settings say: TRACKIO_DIR is where it keeps runs on this disk."""

    def __init__(self, run: TrackedRun) -> None:
        with extra("trackio"):
            trackio = importlib.import_module("trackio")
        config = {name: value for name, value in run.config.items() if value is not None}
        self._run: Any = trackio.init(
            project=_PROJECT, name=run.folder.name, config=config, resume="allow", embed=False
        )


_PROJECT = "jvpipe"
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By name; each needs the extra of its name."""
_PACKAGES = {"tensorboard": "tensorboardX"}
ENTRY_POINTS = "jvpipe.trackers"
"""The group in which packages announce theirs: what takes a `TrackedRun` and gives a `Tracker`."""


def find_tracker(name: str) -> Callable[[TrackedRun], Tracker]:
    """Finds a tracker by name, one of jvpipe's or of an installed package, and what it needs.

    Raises:
        ValueError: it is unknown, or not installed.

    >>> find_tracker("tensorbord")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: unknown tracker 'tensorbord': did you mean 'tensorboard'? There are tensorboard, wandb, ...
    """
    announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in TRACKERS:
        with extra(name):
            importlib.import_module(_PACKAGES.get(name, name))
        return TRACKERS[name]
    if name not in announced:
        raise ValueError(did_you_mean("tracker", name, [*TRACKERS, *announced]))
    try:
        return announced[name].load()
    except Exception as problem:  # it is anybody's code
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise ValueError(f"tracker {name} cannot be loaded: {reason}") from problem


class Tracking:
    """Tells trackers of the steps of a pipeline's run: a function for `on_step`, and a context manager that ends them.

    A step is told once the next one is under way, so that no device waits to be read. With several
    processes the first one tells.

    Args:
        names: of trackers: "tensorboard", "wandb", "mlflow", "trackio", or those of installed
            packages.
        folder: of the run, made if it is not there; its name is the run's.
        config: what is to be known of it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, Tracking("tensorboard", folder) as on_step:
    ...     on_step(None, {"loss": 0.5})  # as `pipe.run(state, batches, on_step=on_step)` does
    """

    def __init__(
        self,
        names: str | Sequence[str],
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        names = [names] if isinstance(names, str) else names
        self._begin = [find_tracker(name) for name in names]
        self._folder, self._config = Path(folder), dict(config or {})
        self._trackers: list[Tracker] | None = None
        self._untold: tuple[int, Mapping[str, Any]] | None = None
        self._steps = 0

    def __call__(self, state: Any, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step that is under way, and tells those of the one before."""
        # A state knows its step; whoever gives none counts from 1.
        self._steps = getattr(state, "step", self._steps + 1)
        if self._trackers is None:
            self._trackers = []
            if jax.process_index() == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                run = TrackedRun(self._folder, self._config, self._steps - 1)
                self._trackers = [begin(run) for begin in self._begin]
        self._tell()
        self._untold = self._steps, metrics

    def _tell(self) -> None:
        if self._untold is None or not self._trackers:
            return
        step, metrics = self._untold
        numbers = scalars_in(metrics)
        for tracker in self._trackers:
            tracker.log(step, numbers)
        self._untold = None

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._tell()
        finally:
            for tracker in self._trackers or ():
                tracker.close()
