"""Timelines by hand: who was busy how long, which share was idle, what is shown."""

from collections.abc import Sequence

import numpy as np
import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.simulate.timeline import Curve, Timeline

TASKS = [Task(0, Kind.F, 0), Task(0, Kind.SEND, 0), Task(1, Kind.F, 0), Task(1, Kind.R, 0)]
"""F0 on device 0, a send that holds both links, F0 on device 1, and what takes no time."""


def timeline(
    starts_s: Sequence[float] = (0, 2, 3, 7), ends_s: Sequence[float] = (2, 3, 7, 7)
) -> Timeline:
    occupies = [(0,), (2, 3), (1,), ()]
    return Timeline(
        TASKS,
        np.array(starts_s, float),
        np.array(ends_s, float),
        occupies,
        ("a", "b", "a out", "b in"),
        2,
    )


def test_a_task_counts_on_all_that_it_occupies() -> None:
    assert timeline().busy_s == {"a": 2.0, "b": 4.0, "a out": 1.0, "b in": 1.0}


def test_bubbles_are_the_idle_share_of_devices_and_links_do_not_count() -> None:
    assert timeline().step_s == 7.0
    assert timeline().bubble_fraction == 1 - (2 + 4) / (2 * 7)
    assert timeline((0, 0, 0, 0), (0, 0, 0, 0)).bubble_fraction == 0.0


def test_what_takes_time_is_shown_on_every_row_that_it_occupies() -> None:
    shown = [(span.device, span.name, span.start_s, span.end_s) for span in timeline().spans()]
    assert shown == [
        ("a", "0F0", 0, 2),
        ("a out", "0SEND0", 2, 3),
        ("b in", "0SEND0", 2, 3),
        ("b", "1F0", 3, 7),
    ]


@pytest.mark.parametrize(
    ("changes", "t_s", "sizes"),
    [
        ([], [0.0], [5]),
        ([(2.0, 1), (2.0, -1)], [0.0, 2.0], [5, 5]),
        ([(0.0, 3), (1.0, -2)], [0.0, 1.0], [8, 6]),
        ([(3.0, -1), (1.0, 4)], [0.0, 1.0, 3.0], [5, 9, 8]),
    ],
)
def test_a_curve_sums_its_changes(
    changes: Sequence[tuple[float, int]], t_s: list[float], sizes: list[int]
) -> None:
    curve = Curve.of("here", changes, 5)
    assert (curve.t_s.tolist(), curve.bytes.tolist(), curve.most_bytes) == (t_s, sizes, max(sizes))
