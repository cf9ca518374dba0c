"""Files with a secret: which are read, and what is said of the others."""

import os
from pathlib import Path

import pytest

from jvpipe.runtime.engine.signed_lines import read_secret


def written(path: Path, text: bytes, mode: int = 0o600) -> str:
    path.write_bytes(text)
    path.chmod(mode)
    return str(path)


def test_the_option_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JVPIPE_SECRET_FILE", raising=False)
    assert read_secret(None) == b""
    monkeypatch.setenv("JVPIPE_SECRET_FILE", written(tmp_path / "one", b"one\n"))
    assert read_secret(None) == b"one"
    assert read_secret(written(tmp_path / "two", b"two", 0o400)) == b"two"


@pytest.mark.parametrize(
    ("mode", "text", "why"),
    [
        (0o644, b"x", r"others may use the file, its mode is 0644: chmod 600 .*/secret$"),
        (0o620, b"x", "mode is 0620"),
        (0o600, b" \n", "is empty"),
        (0o600, b"x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, mode: int, text: bytes, why: str) -> None:
    path = written(tmp_path / "secret", text, mode)
    with pytest.raises(ValueError, match=why) as told:
        read_secret(path)
    assert str(told.value).startswith(f"--secret-file {path}")
    assert "\n" not in str(told.value)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_secret(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is not a file"):
        read_secret(str(tmp_path / "pipe"))
    monkeypatch.setenv("JVPIPE_SECRET_FILE", "")
    with pytest.raises(ValueError, match="JVPIPE_SECRET_FILE  cannot be read: No such file"):
        read_secret(None)
