"""A user's own model on the command line: trained, stopped and resumed to the bit, over one device
or several.
"""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.commands import finished
from tests.grid import grid
from tests.hosts.test_commands import last_lines, processes

OWN = Path(__file__).parents[1] / "own.py"
COMMON = ("--planner", "even", "--batch-size", "8", "--checkpoint-every", "3")


def train(run: Path, *more: str) -> CompletedProcess[str]:
    return finished(*COMMON, "--run-dir", str(run), *more)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.mark.parametrize(
    "name", grid(["Plain", "full"], "Plain")
)  # batches of a generator, and of Grain
def test_a_resumed_run_has_the_bits_of_a_whole_one_on_one_device(name: str, tmp_path: Path) -> None:
    model = ("--model", f"{OWN}:{name}")
    one, two = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    whole = train(tmp_path / "whole", *model, "--steps", "5", "--stages", "1", "--export", str(one))
    assert whole.returncode == 0, whole.stderr
    assert ("held-out loss" in whole.stdout) == (name == "full")
    assert "frequency alone" not in whole.stdout
    run = tmp_path / "run"
    begun = train(run, *model, "--steps", "5", "--stages", "2")
    assert begun.returncode == 0, begun.stderr
    shutil.rmtree(run / "checkpoints" / "00000005")
    resumed = train(run, "--resume", "--export", str(two))
    assert "steps 4 to 5" in resumed.stdout, resumed.stderr
    assert losses(run) == losses(tmp_path / "whole")
    assert list(lines(run)[-1].get("aux", ())) == ["largest"] * (name == "full")
    for key, values in load_file(one).items():
        np.testing.assert_array_equal(values, load_file(two)[key])


@pytest.mark.thorough
def test_stages_share_devices_as_is_decided_and_a_resumed_run_takes_other_counts(
    tmp_path: Path,
) -> None:
    run, model = tmp_path / "run", ("--model", f"{OWN}:Plain", "--planner", "jvpipe")
    begun = train(
        run, *model, "--steps", "2", "--replicas", "auto", "--devices", "2", "--stages", "1"
    )
    assert begun.returncode == 0, begun.stderr
    assert "devices" in (run / "plan.txt").read_text()
    resumed = train(
        run, "--resume", "--planner", "jvpipe", "--replicas", "1,2", "--stages", "2", "--steps", "3"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert [
        len(stage["devices"]) for stage in json.loads((run / "plan.json").read_text())["stages"]
    ] == [1, 2]
    assert len(losses(run)) == 3


@pytest.mark.thorough
def test_processes_train_evaluate_and_save_a_module_s_model_together(tmp_path: Path) -> None:
    model = (
        "--model",
        "tests.own:full",
        "--steps",
        "4",
        "--stages",
        "2",
        "--eval-every",
        "2",
        "--keep",
        "1",
    )
    alone = train(tmp_path / "alone", *model)
    assert alone.returncode == 0, alone.stderr
    with processes(2, [*COMMON, *model, "--run-dir", str(tmp_path / "two")]) as commands:
        ends = last_lines(commands)
    assert [code for code, _ in ends] == [0, 0], ends
    one, two = (
        [(line["loss"], line["aux"], line.get("held_out_loss")) for line in lines(tmp_path / name)]
        for name in ("alone", "two")
    )
    assert one == two
    assert [loss is not None for _, _, loss in two] == [False, True] * 2
    for name in ("alone", "two"):
        step = json.loads((tmp_path / name / "best.json").read_text())["step"]
        assert {int(path.name) for path in (tmp_path / name / "checkpoints").iterdir()} == {step, 4}


def test_processes_must_have_one_model(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("abc", "abcd")]
    lines = "from pathlib import Path", "from tests.own import Plain", ""
    for folder in folders:  # the same file, which makes another model in each
        folder.mkdir()
        (folder / "mine.py").write_text("\n".join(lines) + "mine = Plain(len(Path.cwd().name))\n")
    given = [
        *COMMON,
        "--model",
        "mine.py:mine",
        "--stages",
        "2",
        "--steps",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    with processes(2, given, stands=folders) as commands:
        ends = last_lines(commands)
    assert [code for code, _ in ends] == [2, 2]
    assert any("model_config" in line and "4" in line for _, line in ends), ends


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", f"{OWN}:Plane"), "unknown name 'Plane': did you mean 'Plain'"),
        (
            ("--model", f"{OWN}:Ends", "--steps", "3", "--stages", "1"),
            "has no more batches: make it endless",
        ),
        (
            ("--model", f"{OWN}:full", "--microbatches", "3", "--batch-size", "9"),
            "3 micro-batches do not divide the 8",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    done = train(tmp_path / "run", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
