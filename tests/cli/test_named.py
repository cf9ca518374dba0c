"""`--help` tells every name that there is, `--version` the version, `python -m jvpipe` both."""

import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

import jvpipe
from jvpipe import models
from jvpipe.cli import overview, plan_command, train_command
from jvpipe.cost.presets import PRESETS
from jvpipe.papers.registry import PLANNERS
from jvpipe.schedules import SCHEDULES


@pytest.mark.parametrize("command", [plan_command.main, train_command.main, overview.main])
def test_help_tells_every_name(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(command)
    with suppress(SystemExit):
        command(["--help"])
    told = capsys.readouterr().out
    known = [
        *models.NAMES,
        *models.sizes("bert"),
        *SCHEDULES,
        *PRESETS,
        *(planner.name for planner in PLANNERS),
    ]
    assert [name for name in known if name not in told] == []
    assert "file.py:NAME" in told


@pytest.mark.parametrize("command", [plan_command.main, train_command.main, overview.main])
def test_each_command_tells_the_version(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    with suppress(SystemExit):
        command(["--version"])
    assert capsys.readouterr().out == f"jvpipe {jvpipe.__version__}\n"
    assert jvpipe.__version__ == version("jvpipe")


@pytest.mark.parametrize("command", [plan_command.main, train_command.main])
@pytest.mark.parametrize("given", [["--batch-size", "many"], ["--batch_size=many"]])
def test_what_is_no_number_is_one_line(
    command: object, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    assert command(["--model", "bert", *given]) == 2
    assert capsys.readouterr().err == "error: --batch-size must be a whole number, not 'many'\n"


def test_a_command_of_jvpipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert overview.main(["plan", "--model", "brt"]) == 2
    assert "unknown model 'brt'" in capsys.readouterr().err
    assert overview.main(["trian"]) == 2
    assert (
        capsys.readouterr().err
        == "error: unknown command 'trian': did you mean 'train'? There are train, plan, "
        "completion\n"
    )


COMPLETED = """
source {script}
complete_words() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_jvpipe; echo "${{COMPREPLY[@]}}"; }}
complete_words jvpipe tr
complete_words jvpipe train --sched
complete_words jvpipe plan --schedule zb
complete_words jvpipe plan --hardware a100-8
"""


def test_bash_completes_commands_options_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overview.main(["completion", "bash"]) == 0
    script = tmp_path / "jvpipe.bash"
    script.write_text(capsys.readouterr().out)
    shell = ["bash", "-c", COMPLETED.format(script=script)]
    told = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=20).stdout
    assert told.splitlines() == ["train", "--schedule", "zb-h1 zb-v", "a100-80gb"]


@pytest.mark.parametrize("words", [["completion", "bash"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jvpipe", *words]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["fish"], "error: unknown shell 'fish': There are bash, zsh, tcsh"),
        ([], "error: name one shell: bash, zsh, tcsh"),
    ],
)
def test_a_shell_that_is_not_known_is_told(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overview.main(["completion", *words]) == 2
    assert capsys.readouterr().err.strip() == line
