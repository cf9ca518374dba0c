"""What the command says of what went wrong is one line, and has the cure."""

import errno
import os

import pytest

from jvpipe.cli import train_command


def test_a_disk_that_is_full_is_told_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )  # as a write that no path is known of

    monkeypatch.setattr(train_command, "run", full)
    assert train_command.main([]) == 2
    told = (
        "No space left on device: make room on the disk of the run's folder, and continue with "
        "--resume"
    )
    assert capsys.readouterr().err == f"error: [Errno 28] {told}\n"
