"""The way of a problem to a decision, counted: over calls drawn by hand, and over those of jvpipe's
own planner.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.walk import names, planned, rooms, walked

HERE = Path(__file__).parent
MOST_ROOMS = {"1f1b": 12, "gpipe": 13, "zb-h1": 14, "interleaved": 14}
MOST_NAMES = {"1f1b": 41, "gpipe": 49, "zb-h1": 46, "interleaved": 46}
"""What the way takes today. These may only fall; the aim is 10 rooms and 50 names."""


@dataclass(frozen=True)
class Parcel:
    """What is followed."""

    weight: int


@dataclass(frozen=True, slots=True)
class Cart:
    """What holds one."""

    load: Parcel

    def pulled(self, distance: int) -> int:
        return self.load.weight * distance + unasked(distance)


def unasked(far: int) -> int:
    return max(far, 0)


def sent(parcels: tuple[Parcel, ...], to: int) -> int:
    return sum(Cart(parcel).pulled(to) for parcel in parcels)


def test_a_call_is_on_the_way_if_an_argument_is_or_holds_what_is_followed() -> None:
    walk = walked(Parcel, lambda: sent((Parcel(2),), to=3), HERE)
    followed = {code.co_name for code in walk.passed}
    assert followed >= {"sent", "pulled"}
    assert "unasked" not in followed
    assert "unasked" in {code.co_name for code in walk.called}
    assert rooms(walk.passed, HERE) == ["test_walk.py"]
    assert set(names(walk.passed)) >= {"parcels", "to", "self", "distance"}
    assert "far" not in names(walk.passed)


@pytest.mark.parametrize("schedule", MOST_ROOMS)
def test_a_problem_passes_through_no_more_rooms_and_meets_no_more_names_than_today(
    schedule: str,
) -> None:
    walk = planned(schedule)
    assert len(rooms(walk.passed)) <= MOST_ROOMS[schedule], rooms(walk.passed)
    assert len(names(walk.passed)) <= MOST_NAMES[schedule], names(walk.passed)
