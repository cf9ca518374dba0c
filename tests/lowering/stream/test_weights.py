"""Which weights a stream reads and what it remembers of updates: three layers, the middle one on
the first of two.
"""

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.stream.stream_timeline import PlanSpan, StreamTimeline
from jvpipe.lowering.stream.weights import StreamUpdates, StreamWeights
from jvpipe.lowering.update import Slots
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.schedules.pipedream import PipeDream
from tests.lowering.toy import GRAPH, drawn, layout, optimizer

FIRST, MIDDLE, LAST = GRAPH.layers
CUTS = ([2, 1], [3])


def weights(schedule: Schedule | str, cuts: list[int] = CUTS[0]) -> StreamWeights:
    timeline = StreamTimeline(
        GRAPH, [PlanSpan(0, layout(cuts))], find_schedule(schedule), 2, 4, drained=False
    )
    return StreamWeights(timeline, set())


def updates(of: StreamWeights) -> StreamUpdates:
    return StreamUpdates(of, Expander(GRAPH, of, of.existing), Slots(GRAPH, optimizer(1)))


def test_a_parameter_is_tied_where_its_readers_are_on_several_stages() -> None:
    assert [weights("pipedream").is_tied(p, 0) for p in (0, 1)] == [True, False]
    assert not weights("pipedream", CUTS[1]).is_tied(0, 0)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("pipedream", [0, 0, 1, 2], [0, 0, 1, 2]),
        ("2bw", [0, 0, 0, 0], [0, 0, 0, 0]),
        ("pipemare", [0, 0, 1, 2], [0, 1, 2, 3]),
        ("xpipe", [0, 0, 1, 2], [0, 1, 2, 3]),
    ],
)
def test_versions_of_the_first_of_two_stages(
    name: str, forward: list[int], backward: list[int]
) -> None:
    of = weights(name)
    assert [of.version(1, m, back=False) for m in range(4)] == forward
    assert [of.version(1, m, back=True) for m in range(4)] == backward
    assert [of.version(0, m, back=True) for m in range(4)] == forward, "a tied one is stashed"
    assert [of.ahead(1, m) for m in range(4)] == [
        b - f for f, b in zip(forward, backward, strict=True)
    ]
    assert [of.tau(layer, 0) for layer in range(3)] == [1, 1, 0]


def test_gradients_are_summed_for_the_update_that_takes_them() -> None:
    assert [weights("pipedream").gradient(1, 1, m).version for m in range(4)] == [0, 1, 2, 3]
    two = weights(PipeDream(update_every=2))
    assert [two.gradient(1, 1, m).version for m in range(4)] == [0, 0, 1, 1]
    assert (two.accumulates, weights("pipedream").accumulates) == (True, False)


def test_weights_are_predicted_once_there_is_an_update_to_go_by() -> None:
    of, back = weights("xpipe"), False
    assert list(of.shifts(MIDDLE, 3, [1], back=back)) == [], "nothing is remembered yet"
    of.existing.add(Value(ValueKind.APPLIED, 1))
    (shift,) = of.shifts(MIDDLE, 3, [1], back=back)
    assert drawn(shift) == "SHIFT1: parameter 1 version 2, applied 1 -> predicted 1 micro-batch 3"
    assert str(of.reading(1, 3, back=False)) == "predicted 1 micro-batch 3"
    assert str(of.reading(1, 3, back=True)) == "parameter 1 version 3"
    assert list(of.shifts(MIDDLE, 3, [1], back=back)) == [], "and only once"
    assert list(of.shifts(MIDDLE, 3, [1], back=True)) == [], (
        "a backward of XPipe reads what is there"
    )
    assert of.use(Kind.F, MIDDLE, 3) == Use(Kind.F, 1, 3, 2, (), 1)


def test_weights_are_corrected_for_the_backward() -> None:
    of = weights("pipemare")
    of.existing.add(Value(ValueKind.DELTA, 1))
    (shift,) = of.shifts(MIDDLE, 3, [1], back=True)
    assert drawn(shift) == "SHIFT1: parameter 1 version 3, delta 1 -> corrected 1 micro-batch 3"
    assert str(shift.run) == "ShiftRun(updates=-1)"
    assert of.use(Kind.B, MIDDLE, 3) == Use(Kind.B, 1, 3, 3, (), 1)
    assert of.use(Kind.F, FIRST, 3).tied == ((0, 2),)


def test_the_owner_of_a_tied_parameter_sends_each_version_on() -> None:
    of = weights("pipedream")
    assert [(str(d.value), d.layers) for d in of.tied_versions(FIRST, 2)] == [
        ("parameter 0 version 1", (0, 2))
    ]
    assert of.tied_versions(LAST, 2) == ()


def test_an_update_of_pipemare_remembers_and_one_of_the_last_stage_forgets() -> None:
    of = weights("pipemare")
    made = updates(of).update(1, 0)
    assert (made.version, made.before, made.remembers) == (1, {1: 0}, True)
    assert [drawn(op) for op in made.operations] == [
        "U1: gradient 1 layer 1 version 0, parameter 1 version 0 -> parameter 1 version 1",
        "ZERO1:  -> delta 1, updates 0 layer 1",
        "SETTLE1: parameter 1 version 0, parameter 1 version 1, delta 1, updates 0 layer 1 -> "
        "parameter 1 version 1, delta 1, updates 0 layer 1",
    ]
    alone = weights("pipemare", CUTS[1])
    remembered = {Value(ValueKind.DELTA, 1), Value(ValueKind.UPDATES, 0, 1)}
    alone.existing.update(remembered)
    (update,) = updates(alone).update(1, 0).operations
    assert set(update.forgets) == remembered
    assert not remembered & alone.existing


def test_xpipe_remembers_the_last_update_alone() -> None:
    operations = updates(weights("xpipe")).update(1, 0).operations
    assert [drawn(op) for op in operations[1:]] == [
        "ZERO1:  -> applied 1",
        "SETTLE1: parameter 1 version 0, parameter 1 version 1, applied 1 -> applied 1",
    ]
