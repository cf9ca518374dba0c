"""A folder that names code is believed by the user who made it, where it was made, and by nobody
else.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jvpipe.cli import run_folder
from jvpipe.cli.command_line import parse
from jvpipe.cli.run_folder import RunDir

REFUSED = (
    "was not made here by this user, and names code to be run, own.py:M: if you trust the code, "
    "give --model own.py:M"
)


def made(folder: Path, model: str = "own.py:M", **told: Any) -> Path:
    """A folder as a run of this user makes it."""
    folder.mkdir(parents=True)
    RunDir(folder).write_config(
        {"model": model, run_folder.MARK: run_folder.mark(folder, model)} | told
    )
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user keeps a key of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "jvpipe"


def resumed(folder: Path, *more: str) -> str:
    return parse(["--run-dir", str(folder), "--resume", *more]).model


def test_a_folder_of_ones_own_goes_on(tmp_path: Path, home: Path) -> None:
    folder = made(tmp_path / "run")
    assert resumed(folder) == resumed(Path("run")) == "own.py:M"
    (key,) = home.iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_bytes().hex() not in (folder / "config.json").read_text()


def test_one_from_elsewhere_asks_for_its_model_again(tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(made(tmp_path / "run"), copied)
    with pytest.raises(ValueError, match=REFUSED) as caught:
        resumed(copied)
    assert "\n" not in str(caught.value)
    assert resumed(copied, "--trust") == resumed(copied, "--model", "own.py:M") == "own.py:M"
    assert resumed(copied, "--model=own.py:M") == "own.py:M"
    (tmp_path / "own.toml").write_text('model = "own.py:M"')
    assert resumed(copied, "--config", "own.toml") == "own.py:M"


@pytest.mark.parametrize("written", [None, "", "f" * 64, 3, ["x"], {"x": 1}, True])
def test_a_mark_that_somebody_wrote_is_none(tmp_path: Path, written: object) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        resumed(made(tmp_path / "run", made_here=written))


def test_another_user_is_asked(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run")
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # who became another keeps the key's file
    with pytest.raises(ValueError, match=REFUSED):
        resumed(folder)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=REFUSED):
        resumed(folder)
    assert (tmp_path / "other" / "jvpipe" / "key").exists()


def test_another_file_of_the_same_name_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "run")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    with pytest.raises(ValueError, match=REFUSED):
        resumed(folder)


@pytest.mark.parametrize("model", ["os:path", "unknown", "a/b.py:M"])
def test_modules_are_code_too(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"names code to be run, {model}"):
        resumed(made(tmp_path / "run", model, made_here=""))


def test_models_of_jvpipe_need_no_trust(tmp_path: Path, home: Path) -> None:
    home.parent.mkdir()
    home.touch()  # so no key can be kept
    assert resumed(made(tmp_path / "run", "bert", made_here="")) == "bert"
    with pytest.raises(ValueError, match=REFUSED):
        resumed(made(tmp_path / "other"))


def test_a_key_that_others_can_read_is_none(tmp_path: Path, home: Path) -> None:
    folder = made(tmp_path / "run")
    (home / "key").chmod(0o644)
    with pytest.raises(ValueError, match=REFUSED):
        resumed(folder)
