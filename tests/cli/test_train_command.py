"""What the command says of what went wrong is one line, and has the cure."""

import errno
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from jvpipe.cli import train_command
from jvpipe.cli.job import Job
from jvpipe.cli.keeping import Evaluations
from jvpipe.cli.outputs import Speech
from jvpipe.cli.processes import Watch
from jvpipe.cli.shell import StopRequest
from jvpipe.cli.step_log import StepLog


def test_a_disk_that_is_full_is_told_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )  # as a write that no path is known of

    monkeypatch.setattr(train_command, "run", full)
    assert train_command.main([]) == 2
    told = (
        "No space left on device: make room on the disk of the run's folder, and continue with "
        "--resume"
    )
    assert capsys.readouterr().err == f"error: [Errno 28] {told}\n"


def trained(
    monkeypatch: pytest.MonkeyPatch,
    seen: Evaluations,
    step: int,
    init_from: str | None = None,
    **job: Any,
) -> None:
    """Goes on with a run of 100 steps from a step and its evaluations."""
    monkeypatch.setattr(train_command, "evaluations_before", lambda _: seen)
    monkeypatch.setattr(train_command, "tidy", lambda *_: None)
    options = SimpleNamespace(early_stop=2, adapt=False, init_from=init_from)
    run, workload = SimpleNamespace(path="run"), SimpleNamespace(name="llama", title="llama 1b")
    made = MagicMock(Job, options=options, run=run, workload=workload, steps=100, **job)
    parts = MagicMock(StopRequest), MagicMock(Watch), MagicMock(Speech)
    train_command.train(made, SimpleNamespace(step=step), *parts)


def test_a_run_that_had_stopped_early_announces_no_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(monkeypatch, Evaluations(1.5, best_step=10, since=2), step=30)
    first, last = capsys.readouterr().out.splitlines()
    assert first == "llama 1b: stopped early after step 30, run in run"
    assert "stopped early, as 2 evaluations since were no better" in last


def test_a_model_from_a_folder_is_named_without_a_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(monkeypatch, Evaluations(), step=100, init_from="base")
    assert capsys.readouterr().out.startswith("llama: all 100 steps are done")


def test_an_error_of_the_log_does_not_replace_the_error_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = MagicMock(StepLog)
    log.failed.side_effect = OSError("the log is on a full disk")
    monkeypatch.setattr(train_command, "Recording", MagicMock())
    monkeypatch.setattr(train_command, "Keeper", MagicMock())
    monkeypatch.setattr(train_command, "StepLog", lambda *_: log)
    steps = MagicMock()
    steps.__iter__.side_effect = ValueError("the loss of step 1 is NaN")
    with pytest.raises(ValueError, match="the loss of step 1 is NaN"):
        trained(monkeypatch, Evaluations(), 0, pipe=MagicMock(), stream=lambda *_: steps)
    log.failed.assert_called_once()
