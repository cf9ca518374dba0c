"""A sealed file is read as it was written, or it is said to be another one."""

import json
from pathlib import Path

import pytest

from jvpipe.cli import run_folder
from jvpipe.runtime.state.checkpoints.generations import DamageError

CONTENT = {"stages": 2, "model": {"name": "bert", "rate": 1e-3}, "data": None}


def test_what_was_written_is_read_without_its_digest(tmp_path: Path) -> None:
    run_folder.write_sealed(tmp_path / "file", CONTENT)
    assert run_folder.read_sealed(tmp_path / "file") == CONTENT
    assert "digest" in json.loads((tmp_path / "file").read_text())


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"stages": 2', '"stages": 3', "is not what the run wrote: put it back"),
        ("0.001", "0.002", "is not what the run wrote"),
        ("{", "", "is damaged"),
    ],
)
def test_a_change_is_noticed(old: str, new: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    run_folder.write_sealed(path, CONTENT)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DamageError, match=told):
        run_folder.read_sealed(path)


def test_layout_does_not_matter_and_what_has_no_digest_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    run_folder.write_sealed(path, CONTENT)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert run_folder.read_sealed(path) == CONTENT
    path.write_text(json.dumps(CONTENT))
    with pytest.raises(DamageError, match="has lost its digest: put it back"):
        run_folder.read_sealed(path)


def test_other_json_is_no_sealed_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[1]")
    with pytest.raises(DamageError, match="holds no JSON object"):
        run_folder.read_sealed(tmp_path / "file")
    (tmp_path / "file").write_text('{"a": ' + "[" * 10**5)
    with pytest.raises(DamageError, match="file is damaged: "):
        run_folder.read_sealed(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        run_folder.read_sealed(tmp_path / "none")
