"""The registry of schedules."""

import pytest

from jvpipe.schedules import SCHEDULES, find_schedule


def test_every_schedule_is_found_by_its_name() -> None:
    for name, schedule in SCHEDULES.items():
        assert find_schedule(name) is schedule


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"unknown schedule '1f1p': did you mean '1f1b'\? There are gpipe, 1f1b"
    ):
        find_schedule("1f1p")
