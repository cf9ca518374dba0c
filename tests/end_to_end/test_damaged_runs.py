"""Folders of runs that somebody changed and sealed anew: what is wrong, and where, is one line."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jvpipe.cli import run_folder
from tests.commands import finished
from tests.grid import grid
from tests.session.test_sealed_anew import ODD, changed, lacking, nested, put

OWN = Path(__file__).parents[1] / "own.py"
COMMON = ("--planner", "even", "--batch-size", "8", "--steps", "4", "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    done = finished("--model", f"{OWN}:full", *COMMON, "--run-dir", str(run), "--eval-every", "2")
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy, which may be changed."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def resumed(run: Path, steps: int = 5) -> str:
    """The line with which it is refused; nothing if it goes on."""
    done = finished("--run-dir", str(run), "--resume", "--trust", "--steps", str(steps))
    if done.returncode == 0:
        return ""
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 1000
    return done.stderr


def change_sealed(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = run_folder.read_sealed(file)
    change(content)
    run_folder.write_sealed(file, content)


CONFIG: dict[str, tuple[Any, str]] = {
    "model": ({"a": 1}, r"model is \{'a': 1\}"),
    "size": ([], "size is "),
    "stages": ([[2]], "stages is "),
    "microbatches": (True, "microbatches is True"),
    "schedule": (3, "schedule is 3"),
    "memory_limit": ({}, "memory_limit is "),
    "set": ("x", "set is 'x'"),
    "batch_size": (-8, "--batch-size must be a whole number of at least 1, not -8"),
    "seed": (2**70, "--seed must be a whole number of at most"),
    "learning_rate": (float("nan"), "--learning-rate must be a number above 0, not nan"),
    "model_config": ([], "model_config must be a mapping"),
    "parameters": ({"0": [4]}, r"parameters\['0'\] must be a text"),
    "files": ([], "files must be a mapping"),
    "data_digest": ("x", "data_digest is x there"),
    "steps": (10**30, "--steps must be a whole number of at most"),
    "track": (["x"], "x"),
}
"""What is put into config.json, and what is said of it."""


@pytest.mark.parametrize("name", grid(CONFIG, *list(CONFIG)[::2]))
def test_a_configuration_that_was_changed(name: str, run: Path) -> None:
    value, told = CONFIG[name]
    change_sealed(run / "config.json", put(name, value=value))
    line = finished("--run-dir", str(run), "--resume", "--trust").stderr
    assert re.search(told, line), line
    assert line.count("\n") == 1


def test_a_configuration_that_nests_without_end(run: Path) -> None:
    for content in ('{"a": ' + "[" * 10**5, json.dumps({"a": nested(900)})):
        (run / "config.json").write_text(content)
        assert re.search(r"config\.json (is damaged|has lost)", resumed(run))


PLAN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no stages": (put("stages", value=[]), "plan"),
    "no layers": (put("stages", 0, "layers", value=[]), "the plan lacks layers"),
    "a layer below 0": (put("stages", 0, "layers", value=[-1, 0]), "layers"),
    "a layer twice": (put("stages", 0, "layers", value=[0, 0]), "layers"),
    "no devices": (put("stages", 0, "devices", value=[]), "device"),
    "a device below 0": (put("stages", 0, "devices", value=[-1]), "device -1"),
    "a device that is not there": (put("stages", 0, "devices", value=[10**30]), "device"),
    "an unknown fate": (put("stages", 0, "fates", value={"x": "y"}), "fates"),
    "fates that are a list": (put("stages", 0, "fates", value=[1]), "fates of stage 0"),
    "no schedule": (lambda plan: plan.pop("schedule"), "lacks schedule"),
    "a schedule that is a list": (put("schedule", value=[]), "names"),
    "tasks of nothing": (put("tasks", value=["0X0", "x"]), "task"),
    "tasks that are numbers": (put("tasks", value=[1]), "tasks must be texts"),
    "splits that are texts": (put("splits", value=["x"]), "splits must be whole numbers"),
    "splits that are huge": (put("splits", value=[10**30]), "split"),
}
"""What is changed of plan.json, and what is said of it."""


@pytest.mark.parametrize("what", grid(PLAN, *list(PLAN)[::2]))
def test_a_plan_that_was_changed(what: str, run: Path) -> None:
    change, told = PLAN[what]
    change_sealed(run / "plan.json", change)
    line = resumed(run)
    assert re.search(told, line), line


METRICS = {
    "a text": ('"x"', "elapsed_s of step 4 is 'x', and should be a number of seconds"),
    "a list": ("[1]", "elapsed_s of step 4"),
    "a number of many digits": ("1" * 5000, ""),
    "true": ("true", "elapsed_s of step 4"),
}


@pytest.mark.parametrize("what", grid(METRICS, "a list", "a number of many digits"))
def test_metrics_that_were_changed(what: str, run: Path) -> None:
    value, told = METRICS[what]
    log = run / "metrics.jsonl"
    before = log.read_text()
    log.write_text(re.sub(r'"elapsed_s": [\d.e-]+(?=[^\n]*\n$)', f'"elapsed_s": {value}', before))
    line = resumed(run)
    assert re.search(told, line), line
    if told:
        assert log.read_text() != before, "nothing is dropped"


def test_lines_that_are_no_metrics_are_left_out(run: Path) -> None:
    log = run / "metrics.jsonl"
    odd = ["[" * 10**5, '{"step": true}', '{"step": ' + "1" * 5000 + "}", "{", '"x"', "3", "{}"]
    log.write_text("\n".join([*odd, *log.read_text().splitlines(), '{"step": 5, "lo']))
    assert resumed(run) == ""
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4, 5]


EXTRA: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another step": (put("step", value=2), "has the state of step 2, not of step 4"),
    "no place in the data": (lacking("extra", "data"), "has no position in the data"),
    "another place in the data": (put("extra", "data", value=[1]), "usable position in the data"),
    "evaluations of nothing": (put("extra", "evaluations", value=[]), "evaluations must be"),
    "evaluations of another name": (put("extra", "evaluations", "x", value=1), "evaluations has"),
    "a best step that is a text": (
        put("extra", "evaluations", "best_step", value="x"),
        "best_step must be a whole number",
    ),
    "a best loss that is a text": (
        put("extra", "evaluations", "best_loss", value="x"),
        "best_loss must be a number",
    ),
}
"""What is changed of what a run keeps in its checkpoints, and what is said of it."""


@pytest.mark.parametrize("what", EXTRA)
def test_what_a_run_keeps_in_its_checkpoint(what: str, run: Path, tmp_path: Path) -> None:
    change, told = EXTRA[what]
    last = run / "checkpoints" / "00000004"
    shutil.move(last, tmp_path / "before")
    changed(tmp_path / "before", last, change)
    line = resumed(run)
    assert re.search(told, line), line
    assert "00000004" in line


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_what_chance_puts_anywhere_is_taken_or_refused(name: str, run: Path) -> None:
    chance, before, found = random.Random(3), run_folder.read_sealed(run / name), 0
    for _ in range(8):
        key, value = chance.choice(list(before)), chance.choice(ODD)
        run_folder.write_sealed(run / name, before | {key: value})
        found += resumed(run, 4) != ""
    assert found > 2


def test_checkpoints_that_changed_places(run: Path) -> None:
    folder = run / "checkpoints"
    for old, new in (("00000004", "x"), ("00000002", "00000004"), ("x", "00000002")):
        (folder / old).rename(folder / new)
    assert "00000004 has the state of step 2, not of step 4 as its name says" in resumed(run)
