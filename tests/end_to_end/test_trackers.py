"""A run whose metrics go to TensorBoard and, offline, to Weights & Biases: both hold every metric
of metrics.jsonl.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import finished
from tests.tracked import Logged, of_tensorboard, of_wandb

OWN = Path(__file__).parents[1] / "own.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that both are told of."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = ("--model", f"{OWN}:full", "--planner", "even", "--steps", "4", "--eval-every", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        done = finished(
            *model, "--track", "tensorboard", "--track", "wandb", "--run-dir", str(folder)
        )
    assert done.returncode == 0, done.stderr
    return folder


def logged(run: Path) -> Logged:
    """The numbers in metrics.jsonl; of each device by its name, of staleness the largest."""
    found: dict[tuple[str, int], Any] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if isinstance(value, dict):
                found |= {(f"{name}/{key}", line["step"]): each for key, each in value.items()}
            elif value is not None:
                found[name, line["step"]] = max(value) if isinstance(value, list) else value
    return found


@pytest.mark.thorough
def test_every_metric_is_there(run: Path) -> None:
    wanted, tensorboard, wandb = logged(run), of_tensorboard(run), of_wandb(run)
    names = {name for name, _ in wanted}
    assert {
        "loss",
        "elapsed_s",
        "held_out_loss",
        "aux/largest",
        "peak_bytes/cpu:1",
        "grad_norm",
    } <= names
    for (name, step), value in wanted.items():
        assert tensorboard[name.replace(":", "_"), step] == pytest.approx(value, rel=1e-6), name
        assert wandb[name, step] == pytest.approx(value), name


@pytest.mark.thorough
def test_the_run_has_a_name_that_stays(run: Path) -> None:
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert folder.name.endswith((run / "wandb.id").read_text())
