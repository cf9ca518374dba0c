"""Streams lowered by hand: three layers on two stages, two of them on the first; two micro-batches
a step.
"""

from itertools import pairwise

import pytest

from jvpipe.ir.buffers import Copy
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.stream.lower import StreamLowering
from jvpipe.lowering.stream.period import StreamStep
from jvpipe.lowering.stream.stream_timeline import PlanSpan
from jvpipe.schedules import find_schedule
from tests.lowering.toy import GRAPH, layout, optimizer, row

M = 2
WEIGHTS = (ValueKind.PARAMETER, ValueKind.PREDICTED, ValueKind.CORRECTED)
AT_REST = ["parameter 0 version 0 at 0", "parameter 0 version 0 at 1", "parameter 1 version 0 at 0"]


def stream(name: str, *cuts_from: tuple[int, list[int]]) -> StreamLowering:
    spans = [
        PlanSpan(start, layout(cuts, number=n))
        for n, (start, cuts) in enumerate(cuts_from or [(0, [2, 1])])
    ]
    return StreamLowering(GRAPH, spans, find_schedule(name), M, optimizer(1))


def drawn(step: StreamStep, layer: int = 1, p: int = 1) -> str:
    """What a layer does in a step, each with the version, or the shifted weights, of a parameter
    that it reads.
    """

    def weights(one: Row) -> str:
        values = (step.lowered.buffers[b].value for b in one.reads)
        read = [value for value in values if value.kind in WEIGHTS and value.index == p]
        return " ".join(
            str(v.version) if v.kind is ValueKind.PARAMETER else str(v.kind) for v in read
        )

    own = [
        one
        for one in step.lowered.rows
        if one.layer == layer and one.kind not in (Kind.SEND, Kind.ZERO)
    ]
    return ", ".join(f"{one.kind} {weights(one)}" for one in own)


DRAWN = {
    "pipedream": "F -1, B -2, U -1, F 0, B -1, U 0",
    "2bw": "F -1, B -2, U -1, F -1, B -1",
    "pipemare": "F -1, SHIFT -1, B corrected, U -1, SETTLE -1 0, F 0, SHIFT 0, B corrected, U 0, SETTLE 0 "
    "1",
    "xpipe": "SHIFT -1, F predicted, B -1, U -1, SETTLE -1 0, SHIFT 0, F predicted, B 0, U 0, SETTLE 0 "
    "1",
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_steady_step_reads_the_versions_of_its_rule(name: str) -> None:
    assert drawn(stream(name).steps[-1]) == DRAWN[name]


@pytest.mark.parametrize("name", DRAWN)
def test_steps_hand_on_what_is_in_flight_by_name(name: str) -> None:
    steps = stream(name).steps
    for before, after in pairwise(steps):
        assert before.after == after.before
    assert steps[-1].after == steps[-1].before, "so that every later step is like the last"
    assert [str(spot) for spot in steps[0].before] == AT_REST


def test_the_first_stage_of_two_stashes_two_versions_and_the_last_one() -> None:
    alive = [
        (str(spot.value.kind), spot.value.index, spot.place)
        for spot in stream("pipedream").steps[-1].before
    ]
    assert alive.count(("parameter", 1, 0)) == 2
    assert alive.count(("parameter", 0, 1)) == 0, (
        "of a tied one, its owner sends each version on when it is read"
    )


@pytest.mark.parametrize("name", DRAWN)
def test_a_drain_ends_at_rest(name: str) -> None:
    asked = stream(name)
    for steps in (1, 2, 5):
        drain = asked.drain(steps)
        assert drain.before == asked.step(steps - 1).after
        lasting = [str(spot) for spot in drain.after if spot.value.kind is ValueKind.PARAMETER]
        assert lasting == AT_REST
        assert not any(spot.copy is not Copy.OWN for spot in drain.after)


def test_what_only_later_steps_would_have_read_is_dropped_by_the_drain() -> None:
    """2BW's first step sends version 0 of the tied parameter on for the second, which is then not
    run.
    """
    drain = stream("2bw").drain(1)
    assert (
        row(drain.lowered.rows[0], drain.lowered.buffers)
        == "DROP on 1: parameter 0 version -1 at 1 -> "
    )
    assert not [one for one in drain.lowered.rows[1:] if one.kind is Kind.DROP]
    assert not [one for one in stream("pipedream").drain(2).lowered.rows if one.kind is Kind.DROP]


def test_a_layer_that_changes_stages_takes_its_weights_along_and_frees_its_old_place_later() -> (
    None
):
    asked = stream("pipedream", (0, [2, 1]), (4, [1, 2]))
    at_change = asked.step(asked.switch_step).lowered
    (move,) = (one for one in at_change.rows if one.kind is Kind.MOVE)
    old, new = (at_change.buffers[b] for b in (*move.reads, *move.writes))
    assert (old.value.kind, old.value.index, old.place, new.place) == (ValueKind.PARAMETER, 1, 0, 1)
    later = asked.step(asked.switch_step + 1).lowered
    places = [
        one.place for one in (*at_change.rows, *later.rows) if one.kind is Kind.F and one.layer == 1
    ]
    assert places == [1] * len(places)
    freed = [one.kind for one in (*at_change.rows, *later.rows) if one.kind is Kind.FREE]
    assert freed == [Kind.FREE]
