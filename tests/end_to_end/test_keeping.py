"""Runs that are evaluated and saved while they train: nothing of it changes a bit, and a killed one
goes on.
"""

import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import jax
import pytest

import jvpipe
from jvpipe.cli import train_command
from jvpipe.cli.keeping import Keeper
from jvpipe.runtime.state.checkpoints import array_file
from tests.commands import finished
from tests.forks import forked

OWN = Path(__file__).parents[1] / "own.py"
COMMON = ("--planner", "even", "--batch-size", "8", "--steps", "12", "--checkpoint-every", "4")
EVALUATED = ("--eval-every", "3", "--keep", "1")


def arguments(run: Path, *more: str, model: str = "full") -> list[str]:
    return ["--model", f"{OWN}:{model}", *COMMON, "--run-dir", str(run), *more]


def resume(run: Path, *more: str) -> CompletedProcess[str]:
    return finished("--run-dir", str(run), "--resume", *more)


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return found


def told(run: Path) -> list[tuple[float, float | None]]:
    """What must not depend on the clock: loss and held-out loss of each step."""
    return [(line["loss"], line.get("held_out_loss")) for line in lines(run)]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is evaluated every third step."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    done = finished(*arguments(run, *EVALUATED, "--export", str(run.parent / "whole.safetensors")))
    assert done.returncode == 0, done.stderr
    assert "best held-out loss" in done.stdout
    return run


def test_evaluations_are_logged_and_the_best_checkpoint_is_kept(whole: Path) -> None:
    found = {
        line["step"]: line["held_out_loss"] for line in lines(whole) if "held_out_loss" in line
    }
    assert list(found) == [3, 6, 9, 12]
    best = json.loads((whole / "best.json").read_text())
    assert best["held_out_loss"] == min(found.values()) == found[best["step"]]
    assert (
        jvpipe.checkpoint_extra(whole / best["checkpoint"])["evaluations"]["best_step"]
        == best["step"]
    )
    assert checkpoints(whole) == sorted({best["step"], 12})
    spans = json.loads((whole / "timeline.json").read_text())["traceEvents"]
    assert any("B" in event["name"] for event in spans if event["ph"] == "X"), (
        "of a step, not of an evaluation"
    )


@pytest.mark.thorough
def test_evaluations_change_no_bit(whole: Path, tmp_path: Path) -> None:
    run, export = tmp_path / "run", tmp_path / "run.safetensors"
    done = finished(*arguments(run, "--stages", "1", "--export", str(export)))
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    assert export.read_bytes() == (whole.parent / "whole.safetensors").read_bytes()
    assert checkpoints(run) == [8, 12]
    assert not (run / "best.json").exists()


def looked_at_before_restoring(arguments: Sequence[str]) -> int:
    """The command line, which tells how many arrays there are when a checkpoint is restored."""
    restore = jvpipe.Pipeline.restore

    def told(pipe: jvpipe.Pipeline, path: str | Path) -> jvpipe.State:
        gc.collect()
        print("arrays:", len(jax.live_arrays()))
        return restore(pipe, path)

    with mock.patch.object(jvpipe.Pipeline, "restore", told):
        return train_command.main(list(arguments))


@pytest.mark.thorough
def test_a_resumed_run_does_not_hold_its_first_state_beside_the_restored_one(whole: Path) -> None:
    with forked(looked_at_before_restoring, "--run-dir", str(whole), "--resume") as command:
        done = command.ended()
    assert done.returncode == 0, done.stderr
    assert "arrays: 1\n" in done.stdout, "the key of the run alone"


def killed_at_the_third_evaluation(arguments: Sequence[str]) -> int:
    """The command line, which is killed in step 9, perhaps while the checkpoint of step 8 is
    written.
    """
    calls, evaluate = [], train_command.held_out_loss

    def killing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*given)

    train_command.held_out_loss = killing
    return train_command.main(list(arguments))


def test_a_killed_run_goes_on_to_the_bit_with_its_evaluations(whole: Path, tmp_path: Path) -> None:
    run, export = tmp_path / "run", tmp_path / "run.safetensors"
    with forked(killed_at_the_third_evaluation, *arguments(run, *EVALUATED)) as command:
        assert command.ended().returncode == -signal.SIGKILL
    assert max(checkpoints(run)) >= 6, "that of step 6 was whole before the next began"
    shutil.rmtree(run / "checkpoints" / f"{8:08d}", ignore_errors=True)
    assert max(checkpoints(run)) == 6
    done = resume(run, "--export", str(export))
    assert done.returncode == 0, done.stderr
    assert told(run) == told(whole)
    assert export.read_bytes() == (whole.parent / "whole.safetensors").read_bytes()
    assert json.loads((run / "best.json").read_text()) == json.loads(
        (whole / "best.json").read_text()
    )
    assert checkpoints(run) == checkpoints(whole)


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    assert finished(*arguments(run, "--keep", "1", model="Plain")).returncode == 0
    shutil.move(run / "checkpoints" / "00000012", moved)
    (run / "checkpoints" / "00000012").symlink_to(moved)
    done = resume(run, "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "00000012 cannot be deleted (it is a link)" in done.stderr
    assert len(lines(run)) == 20
    assert checkpoints(run) == [12, 20]
    assert jvpipe.checkpoint_extra(moved)["step"] == 12


@pytest.mark.parametrize("another", [False, True])
def test_a_folder_that_moves_away_is_said_and_not_made_anew(
    another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moved, save = tmp_path / "run", tmp_path / "moved", Keeper.save

    def moving(keeper: Keeper, state: Any, step: int, *given: Any) -> None:
        if step == 8:
            keeper.finish()
            run.rename(moved)
            if another:
                run.mkdir()
        save(keeper, state, step, *given)

    monkeypatch.setattr(Keeper, "save", moving)
    done = finished(*arguments(run, model="Plain"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (
        f"error: {run} was moved or deleted during the run, so the state after step 8"
        in done.stderr
    )
    assert list(run.iterdir()) == [] if another else not run.exists()
    assert checkpoints(moved) == [4]
    monkeypatch.undo()
    assert resume(moved, "--trust").returncode == 0
    assert len(lines(moved)) == 12


@pytest.mark.thorough
def test_a_run_stops_early_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = finished(
        *arguments(run, "--eval-every", "2", "--early-stop", "2", "--keep", "1", model="Worsens")
    )
    assert done.returncode == 0, done.stderr
    assert (
        "after step 2 (see best.json); stopped early, as 2 evaluations since were no better"
        in done.stdout
    )
    assert len(lines(run)) == 6
    assert checkpoints(run) == [2, 6]
    again = resume(run)
    assert "stopped early" in again.stdout
    assert len(lines(run)) == 6
    more = resume(run, "--early-stop", "3")
    assert more.returncode == 0, more.stderr
    assert "stopped early, as 3 evaluations" in more.stdout
    assert len(lines(run)) == 8


@pytest.mark.thorough
def test_steps_do_not_wait_for_the_disk(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoint is not written before two more steps are logged."""
    run = tmp_path / "run"
    write, log = array_file.write, run / "metrics.jsonl"

    def slowly(file: Path, *given: Any) -> None:
        until = time.monotonic() + 60
        while "/00000004/" in str(file) and len(log.read_text().splitlines()) < 6:
            assert time.monotonic() < until
            time.sleep(0.01)
        write(file, *given)

    monkeypatch.setattr(array_file, "write", slowly)
    done = finished(*arguments(run))
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: Path, packed: Any, checkpoint: Path) -> None:
        raise OSError(f"cannot write the checkpoint {checkpoint}: No space left on device")

    run = tmp_path / "run"
    monkeypatch.setattr(array_file, "write", fails)
    done = finished(*arguments(run, model="Plain"))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: cannot write the checkpoint {run / 'checkpoints' / '00000004'}: No space "
        "left on device\n"
    )
    assert len(lines(run)) <= 8, "it was told before the next one began"


@pytest.mark.parametrize(
    ("model", "more", "wrong"),
    [
        (
            "Plain",
            ("--eval-every", "3"),
            "--eval-every 3: Plain has no held-out batches",
        ),
        ("full", ("--early-stop", "3"), "--early-stop 3 needs --eval-every"),
        ("full", ("--keep", "0"), "--keep must be a whole number of at least 1, not 0"),
    ],
)
def test_mistakes_are_one_line(
    model: str, more: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    done = finished(*arguments(tmp_path / "run", *more, model=model))
    assert done.returncode == 2
    assert wrong in done.stderr
    assert done.stderr.count("\n") == 1
