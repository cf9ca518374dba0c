"""Fixed blows of the storm that experiments/hosts/storm.py lets fall at random."""

from pathlib import Path

import pytest

from experiments.hosts.storm import Blow, struck
from tests.grid import grid

BLOWS = [
    Blow("killed", 3, 1, step=3, delay_s=0.0),
    Blow("stopped", 2, 0, step=3, delay_s=0.0),
    Blow("cut off", 2, 1, step=3, delay_s=0.0),
]


@pytest.mark.parametrize("blow", grid(BLOWS, BLOWS[0], BLOWS[2]), ids=str)
def test_who_is_left_names_whom_it_has_waited_for_in_time(blow: Blow, tmp_path: Path) -> None:
    for end in struck(blow, tmp_path / "run"):
        assert not end.faults(blow), end
