"""Trackers write what they are told, and one that is not installed is named with its extra."""

import sys
from pathlib import Path

import pytest

from jvpipe.report.trackers import TRACKERS, TensorBoard, TrackedRun, check_tracker
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


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_one_that_is_not_installed_is_named_with_its_extra(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = rf"^{package} is not installed: pip install 'jvpipe\[{name}\]'$"
    with pytest.raises(ValueError, match=told):
        check_tracker(name)
    with pytest.raises(ValueError, match=told):
        TRACKERS[name](TrackedRun(tmp_path, {}))


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(ValueError, match="unknown tracker 'wandbb': did you mean 'wandb'"):
        check_tracker("wandbb")
