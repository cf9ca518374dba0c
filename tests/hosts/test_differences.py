"""What two processes are given differently is named by both, with the exit code of the table."""

from pathlib import Path

import pytest

from experiments.hosts.differences import PARTS, faults, words
from tests.grid import grid


@pytest.mark.parametrize("name", grid(PARTS, "its rate", "schedule"))
def test_both_name_what_differs(name: str, tmp_path: Path) -> None:
    told = words(name, tmp_path)
    assert not any(faults(name, i, word) for i, word in enumerate(told)), told
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("checkpoints/*"))
