"""A run whose model and recipe are told by a file and by options, and what of them a resumed one
may change.
"""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from experiments.faults.runs import page
from tests.commands import finished

RECIPE = """
size = "tiny"
planner = "even"
stages = 1
batch-size = 8
steps = 3
sequence-length = 8
optimizer = "momentum"
learning_rate = 0.5

[set]
blocks = 1
width = 16
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of that file, but for a rate and a warm-up on the command line."""
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "recipe.toml"
    file.write_text(f'data = "{page(folder / "page.txt")}"\n{RECIPE}')
    done = begun(file, folder / "run", "--learning-rate", "0.25", "--warmup", "2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def begun(file: Path, run: Path, *more: str) -> CompletedProcess[str]:
    return finished("--config", str(file), "--run-dir", str(run), *more)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_the_model_and_its_recipe_are_what_was_asked_for(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert {name: config["model_config"][name] for name in ("blocks", "width", "tokens")} == {
        "blocks": 1,
        "width": 16,
        "tokens": 8,
    }
    assert [round(line["learning_rate"], 4) for line in lines(run)[:2]] == [0.125, 0.25]
    assert lines(run)[0]["tokens_per_s"] == pytest.approx(8 * lines(run)[0]["examples_per_s"])


@pytest.mark.thorough
def test_the_file_that_it_wrote_begins_the_same_run_again(run: Path, tmp_path: Path) -> None:
    done = begun(run / "config.json", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines(tmp_path / "again")] == [
        line["loss"] for line in lines(run)
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--set", "width=32"), "model_config: width is 16 there, 32 here"),
        (("--sequence-length", "16"), "model_config: tokens is 8 there, 16 here"),
        (("--optimizer", "lion"), "optimizer is momentum there, lion here"),
        (("--set", "witdh=32"), "unknown option of bert 'witdh': did you mean 'width'"),
    ],
)
def test_a_resumed_run_has_the_model_and_the_optimizer_that_it_had(
    more: tuple[str, ...], told: str, run: Path
) -> None:
    refused = finished("--run-dir", str(run), "--resume", "--steps", "4", *more)
    assert refused.returncode == 2
    assert told in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_resumed_run_may_have_another_rate(run: Path) -> None:
    done = finished("--run-dir", str(run), "--resume", "--steps", "4", "--learning-rate", "0.125")
    assert done.returncode == 0, done.stderr
    assert 0 < lines(run)[3]["learning_rate"] < 0.125
