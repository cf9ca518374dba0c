"""Trackers write what they are told, and one that is not installed is named with its extra."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvpipe
from jvpipe.report import trackers
from jvpipe.report.trackers import TRACKERS, TensorBoard, TrackedRun, find_tracker
from tests.tracked import of_tensorboard


def test_event_files_hold_every_number(tmp_path: Path) -> None:
    tracker = TensorBoard(TrackedRun(tmp_path, {}))
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 4.0 / step, "peak_bytes/cpu:0": 10.0 * step})
    tracker.close()
    found = of_tensorboard(tmp_path)
    assert len(found) == 6
    assert found["loss", 2] == 2.0
    assert found["peak_bytes/cpu_0", 3] == 30.0


def test_what_a_resumed_run_makes_again_takes_the_place_of_what_was(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (2, 7.0)):
        tracker = TensorBoard(TrackedRun(tmp_path, {}, first))
        for step in range(first + 1, first + 5):
            tracker.log(step, {"loss": value})
        tracker.close()
    found = of_tensorboard(tmp_path)
    assert [found["loss", step] for step in range(1, 7)] == [1.0] * 2 + [7.0] * 4


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("tensorboard", "tensorboardX"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
    ],
)
def test_one_that_is_not_installed_is_named_with_its_extra(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = rf"^{package} is not installed: pip install 'jvpipe\[{name}\]'$"
    with pytest.raises(ValueError, match=told):
        find_tracker(name)
    with pytest.raises(ValueError, match=told):
        TRACKERS[name](TrackedRun(tmp_path, {}))


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(ValueError, match="unknown tracker 'wandbb': did you mean 'wandb'"):
        find_tracker("wandbb")


class Told:
    """A tracker of some package: keeps what it is told."""

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.steps, self.closed = run, list[Any](), False
        runs.append(self)

    def log(self, step: int, metrics: Any) -> None:
        self.steps.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


runs: list[Told] = []


def test_one_of_a_package_is_found_and_told_of_steps_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = SimpleNamespace(name="told", load=lambda: Told)
    monkeypatch.setattr(trackers, "entry_points", lambda *, group: [point])
    with pytest.raises(ValueError, match="did you mean 'told'"):
        jvpipe.Tracking("tolt", tmp_path)
    with jvpipe.Tracking(["told"], tmp_path / "run", {"rate": 1}) as on_step:
        for step in (3, 4):
            metrics = {"loss": np.float32(step), "aux": {"x": 0.5, "logits": np.zeros(2)}}
            on_step(SimpleNamespace(step=step), metrics)
            (run,) = runs
            assert [n for n, _ in run.steps] == list(range(3, step))  # one behind
    assert run.steps == [(n, {"loss": float(n), "aux/x": 0.5}) for n in (3, 4)]
    assert run.closed
    assert run.run == TrackedRun(tmp_path / "run", {"rate": 1}, first_step=2)


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("no module\nof this name")

    point = SimpleNamespace(name="told", load=load)
    monkeypatch.setattr(trackers, "entry_points", lambda *, group: [point])
    with pytest.raises(ValueError, match=r"^tracker told cannot be loaded: no module$"):
        find_tracker("told")


@pytest.mark.parametrize("names", [None, True, 3, [None], [["wandb"]], np.ones(2)])
def test_what_is_no_name_is_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tracker"):
        jvpipe.Tracking(names, tmp_path)


def test_a_folder_is_a_path() -> None:
    with pytest.raises(ValueError, match=r"folder must be a text or a pathlib\.Path, not None"):
        jvpipe.Tracking([], None)  # type: ignore[arg-type]


def test_where_one_fails_no_other_gets_a_step_twice_or_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, numbers: Any) -> None:
            said.append((self.name, step))
            if self.name == "second":
                raise OSError("disk full")

        def close(self) -> None:
            said.append((self.name, "closed"))
            if self.name == "first":
                raise OSError("connection lost")

    monkeypatch.setattr(trackers, "find_tracker", lambda name: lambda run: Fake(name))
    tracking = trackers.Tracking(["first", "second"], tmp_path)
    with pytest.raises(OSError, match="connection lost"), tracking:  # noqa: PT012 - the 2nd call
        tracking(None, {"loss": 1.0})
        tracking(None, {"loss": 2.0})
    assert said == [("first", 1), ("second", 1), ("first", "closed"), ("second", "closed")]
