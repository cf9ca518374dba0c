"""Sends the metrics of a run to trackers: TensorBoard, Weights & Biases, MLflow and trackio.

Other packages can add trackers through entry points (`ENTRY_POINTS`).
"""

import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import jax

from jvpipe.report.metrics import scalars_in
from jvpipe.util.brief import first_line
from jvpipe.util.extras import extra
from jvpipe.util.given import checked_path, several
from jvpipe.util.names import did_you_mean

Numbers = Mapping[str, int | float]
"""The metrics of a step that are numbers, by name."""


class Tracker(Protocol):
    """A receiver of the metrics of each step."""

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step; steps count from 1."""
        ...

    def close(self) -> None:
        """Writes all pending metrics. This is the last call."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The information about a run that a tracker receives.

    Attributes:
        folder: the folder of the run; its name is the name of the run.
        config: the options of the run.
        first_step: the number of steps that the run had made before it was started or resumed.
    """

    folder: Path
    config: Mapping[str, Any]
    first_step: int = 0


class TensorBoard:
    """A tracker that writes event files to the folder `tensorboard` of the run.

    A resumed run purges the steps logged after its last checkpoint, and logs them again.
    TensorBoard's names cannot have colons, so peak_bytes/cpu:0 becomes peak_bytes/cpu_0.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("tensorboard"):
            from tensorboardX import SummaryWriter
        self._writer = SummaryWriter(
            str(run.folder / "tensorboard"),
            purge_step=run.first_step + 1 if run.first_step else None,
            filename_suffix=f".from-{run.first_step}",  # each start of the run writes its own file
        )

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name.replace(":", "_"), value, step)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class _Sent:
    """A tracker for a package that has a run object with `log` and `finish`."""

    _run: Any

    def log(self, step: int, metrics: Numbers) -> None:
        """Takes the numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until all metrics are written or sent."""
        self._run.finish()


class WeightsAndBiases(_Sent):
    """A tracker that sends to Weights & Biases; wandb reads its own settings.

    WANDB_MODE=offline keeps the metrics in the folder `wandb` of the run. A resumed run keeps its
    id, which the file `wandb.id` holds.
    """

    def __init__(self, run: TrackedRun) -> None:
        with extra("wandb"):
            import wandb
        named = run.folder / "wandb.id"
        # If the file exists, the run is resumed under its old id.
        if not named.exists():
            named.write_text(uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                project=_PROJECT,
                name=run.folder.name,
                dir=str(run.folder),
                config=dict(run.config),
                id=named.read_text(),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as problem:
            reason = first_line(problem).rstrip(".")
            raise ValueError(
                f"--track wandb: {reason}; WANDB_MODE=offline keeps the metrics on this disk"
            ) from problem


class MLflow:
    """A tracker that sends to MLflow's MLFLOW_TRACKING_URI, or to a database in the run's folder.

    A resumed run keeps its id, which the file `mlflow.id` holds.
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
        # Each call is a request to the server, so a step's metrics are sent in one batch.
        batch = [self._metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id)


class Trackio(_Sent):
    """A tracker that sends to trackio, which reads its own settings, such as TRACKIO_DIR."""

    def __init__(self, run: TrackedRun) -> None:
        with extra("trackio"):
            trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=_PROJECT,
            name=run.folder.name,
            config={name: value for name, value in run.config.items() if value is not None},
            resume="allow",
            embed=False,
        )


_PROJECT = "jvpipe"
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""jvpipe's own trackers by name; each needs jvpipe's optional dependency of the same name."""
_PACKAGES = {"tensorboard": "tensorboardX"}
ENTRY_POINTS = "jvpipe.trackers"
"""The group of entry points in which packages register trackers. Each entry point is a function
that takes a `TrackedRun` and returns a `Tracker`."""


def find_tracker(name: Any) -> Callable[[TrackedRun], Tracker]:
    """Returns the tracker with a name, from jvpipe or from another installed package.

    Raises:
        ValueError: there is no such tracker, or its package is not installed or cannot be loaded.

    >>> find_tracker("tensorbord")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: unknown tracker 'tensorbord': did you mean 'tensorboard'? There are tensorboard, wandb, ...
    """
    announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if isinstance(name, str) and name in TRACKERS:
        with extra(name):
            importlib.import_module(_PACKAGES.get(name, name))
        return TRACKERS[name]
    if not isinstance(name, str) or name not in announced:
        raise ValueError(did_you_mean("tracker", name, [*TRACKERS, *announced]))
    try:
        return announced[name].load()
    except Exception as problem:  # another package's code may raise any kind of error
        raise ValueError(f"tracker {name} cannot be loaded: {first_line(problem)}") from problem


class Tracking:
    """A function for `on_step` that sends the metrics of a run to trackers.

    It is also a context manager, which closes the trackers at its end. The metrics of a step are
    read after the next step has been dispatched, so that devices are not idle meanwhile. If the run
    has several processes, only the first one sends.

    Args:
        names: names of trackers: "tensorboard", "wandb", "mlflow", "trackio", or others that
            installed packages register.
        folder: the folder of the run, which is made if needed; its name is the name of the run.
        config: the options of the run, for the trackers to record.

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
        # A single value, such as a text, is looked up as one name.
        listed = several(names)
        self._begin = list(map(find_tracker, [names] if listed is None else listed))
        self._folder, self._config = checked_path("folder", folder), dict(config or {})
        self._trackers: list[Tracker] | None = None
        # The step and metrics that were dispatched but not yet sent.
        self._untold: tuple[int, Mapping[str, Any]] | None = None
        self._steps = 0

    def __call__(self, state: Any, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a dispatched step, and sends those of the step before it."""
        # The state has the number of the step. Without a state, calls are counted from 1.
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
        self._untold = None  # before logging: no tracker gets a step twice if another one fails
        numbers = scalars_in(metrics)
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as closing:  # closes each tracker, even if another one fails
            for tracker in reversed(self._trackers or ()):
                closing.callback(tracker.close)
            self._tell()
