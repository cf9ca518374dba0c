"""The asynchronous families: their pictures, their rules, what they hold, and the options that they
refuse.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jvpipe.ir.task import text
from jvpipe.schedules import pipedream
from jvpipe.schedules.pipedream import PipeDream
from jvpipe.schedules.pipemare import PipeMare
from jvpipe.schedules.schedule import Schedule, at_least
from jvpipe.schedules.two_bw import TwoBW
from jvpipe.schedules.xpipe import XPipe
from tests.schedules.drawing import parse, started

FAMILIES = [PipeDream(), PipeDream(vertical_sync=True), TwoBW(), PipeMare(), XPipe()]


@pytest.mark.parametrize("schedule", FAMILIES, ids=lambda s: s.name)
def test_a_stream_runs_as_pipedream_draws_it(schedule: Schedule) -> None:
    assert started(schedule.lists(3, 5)) == parse(pipedream.__doc__ or "")
    assert not schedule.synchronous
    assert schedule.in_flight(3, 5) == (3, 2, 1)


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        (PipeDream(), [3, 2, 1]),
        (PipeDream(vertical_sync=True), [3, 3, 3]),
        (TwoBW(), [2, 2, 2]),
        (PipeMare(), [2, 2, 1]),  # the corrected ones, but on the last stage
        (XPipe(), [3, 3, 1]),  # the last update and the predicted ones, but on the last stage
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_stage_holds_so_many_versions(schedule: Schedule, held: list[int]) -> None:
    assert [schedule.versions(s, 3) for s in range(3)] == held


def test_an_update_follows_every_backward_or_the_last_of_some() -> None:
    assert text(PipeDream().with_updates(2, 2)[1]) == "1F0 1B0 1U0 1F1 1B1 1U1"
    assert (
        text(XPipe(update_every=2).with_updates(2, 4)[1])
        == "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3"
    )
    assert text(TwoBW().with_updates(1, 3)[0]) == "0F0 0B0 0F1 0B1 0F2 0B2 0U2"


def test_rules_say_what_a_forward_and_a_backward_read() -> None:
    assert [(s.rule, s.stash) for s in FAMILIES] == [
        ("newest", True),
        ("first stage", True),
        ("one behind", True),
        ("newest", False),
        ("newest", False),
    ]
    assert [s.name for s in FAMILIES if s.predicts] == ["xpipe"]
    assert [s.name for s in FAMILIES if s.decay is not None] == ["pipemare"]


@pytest.mark.parametrize("stages", [1, 4])
def test_a_last_stage_neither_predicts_nor_corrects(stages: int) -> None:
    assert PipeMare().versions(stages - 1, stages) == XPipe().versions(stages - 1, stages) == 1


@pytest.mark.parametrize("decay", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_a_decay_is_any_real_number(decay: Any) -> None:
    assert PipeMare(decay=decay).options == PipeMare(decay=0.5).options
    with pytest.raises(ValueError, match="decay must lie between 0 and 1, not be "):
        PipeMare(decay=2 * decay)


def test_options_are_named_where_they_are_refused() -> None:
    with pytest.raises(
        ValueError, match="update_every must be a whole number of at least 1, not 0"
    ):
        PipeDream(update_every=0)
    with pytest.raises(
        ValueError, match="anneal_updates must be a whole number of at least 0, not -1"
    ):
        PipeMare(anneal_updates=-1)
    with pytest.raises(
        ValueError, match="update_every must be a whole number of at least 1, not '2'"
    ):
        at_least(1, update_every="2")
    with pytest.raises(
        ValueError, match="2bw on 3 stages needs at least 3 micro-batches, but 2 are given"
    ):
        TwoBW().check(3, 2)
