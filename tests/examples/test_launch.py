"""Launch files: what they do about exit code 75, and that their commands have options that there
are.
"""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from jvpipe.cli.command_options import TrainOptions

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"
WORKER = """
import sys
from pathlib import Path
codes = Path("codes").read_text().split()
Path("codes").write_text(" ".join(codes[1:]))
with Path("calls").open("a") as file:
    print(*sys.argv[1:], file=file)
if not codes[0].endswith("!"):  # a process that never met the others makes no folder
    Path("run/checkpoints").mkdir(parents=True, exist_ok=True)
sys.exit(int(codes[0].rstrip("!")))
"""


def looped(folder: Path, codes: str, tries: int = 5) -> tuple[int, list[str]]:
    """The exit code of the loop around a command with these ones, and how it was called."""
    (folder / "worker.py").write_text(WORKER)
    (folder / "codes").write_text(codes)
    settings = {
        "COMMAND": f"{sys.executable} worker.py",
        "PAUSE_S": "0",
        "TRIES": str(tries),
        "PATH": "/usr/bin:/bin",
    }
    loop = ["sh", str(LAUNCH / "loop.sh"), "--run-dir", "run"]
    done = subprocess.run(loop, cwd=folder, env=settings, timeout=60)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "tries", "code", "calls"),
    [
        ("75 75 0", 5, 0, ["--run-dir run", "--run-dir run --resume", "--run-dir run --resume"]),
        ("75! 75 0", 5, 0, ["--run-dir run", "--run-dir run", "--run-dir run --resume"]),
        ("2", 5, 2, ["--run-dir run"]),
        ("75 130", 5, 130, ["--run-dir run", "--run-dir run --resume"]),
        ("75 75 75", 2, 75, ["--run-dir run", "--run-dir run --resume"]),
    ],
)
def test_the_loop_resumes_after_75_alone(
    tmp_path: Path, codes: str, tries: int, code: int, calls: list[str]
) -> None:
    assert looped(tmp_path, codes, tries) == (code, calls)


def test_the_unit_begins_a_run_and_resumes_one_with_checkpoints(tmp_path: Path) -> None:
    unit = (LAUNCH / "jvpipe.service").read_text()
    restarts = [line for line in unit.splitlines() if line.startswith("Restart")]
    assert restarts == ["Restart=no", "RestartForceExitStatus=75", "RestartSec=10"]
    match = re.search(r"^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)
    assert match
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def told() -> str:
        where = {"cwd": tmp_path, "env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}}
        command = ["/bin/sh", "-c", match[1]]
        return subprocess.run(command, capture_output=True, text=True, check=True, **where).stdout

    assert told() == "-m jvpipe.train --run-dir runs/first --model bert --stages 2\n"
    (tmp_path / "runs/first/checkpoints").mkdir(parents=True)
    assert told() == "-m jvpipe.train --run-dir runs/first --resume\n"


def test_the_jobset_restarts_all_for_75_alone() -> None:
    told = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]
    (rule,) = told["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSet", ["PodFailurePolicy"])
    (policy,) = told["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert policy["onExitCodes"]["values"] == [75]


def test_shells_can_read_the_scripts() -> None:
    for name in ("loop.sh", "train.sbatch"):
        subprocess.run(["bash", "-n", str(LAUNCH / name)], check=True)
    assert "-eq 75 ]; then\n    scontrol requeue" in (LAUNCH / "train.sbatch").read_text()


@pytest.mark.parametrize("name", ["loop.sh", "jvpipe.service", "train.sbatch", "jobset.yaml"])
def test_options_are_those_of_the_command(name: str) -> None:
    known = {f"--{field.name.replace('_', '-')}" for field in fields(TrainOptions)}
    text = (LAUNCH / name).read_text()
    used = set()
    for command in re.findall(r"jvpipe\.train((?:[^\n]*\\\n)*[^\n]*)", text):
        used |= set(re.findall(r"--[a-z-]+", command))
    assert used <= known, used - known
