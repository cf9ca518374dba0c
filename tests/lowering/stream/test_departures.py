"""Layers that change places in a stream: what is freed when, what comes at once, what may be
overwritten.
"""

from dataclasses import replace

from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Ref
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.place import Placer
from jvpipe.lowering.stream.departures import Departures, LastReads, refresh, settle
from jvpipe.lowering.stream.stream_timeline import PlanSpan, StreamTimeline
from jvpipe.lowering.stream.weights import StreamWeights
from jvpipe.schedules import find_schedule
from tests.lowering.toy import GRAPH, array, layout, optimizer, row

HERE, THERE = Plan.from_cuts([2, 1]), Plan.from_cuts([1, 2])
P0, P1 = (Value(ValueKind.PARAMETER, p, version=0) for p in (0, 1))


def placer() -> Placer:
    made = Placer(GRAPH, HERE, optimizer(1))
    made.begin()
    return made


def rows(made: Placer) -> list[str]:
    return [row(one, made.buffers) for block in made.blocks for one in block.rows]


def test_what_was_left_is_freed_two_tasks_of_every_stage_later() -> None:
    made = placer()
    departures = Departures(made)
    made.enter(THERE)
    made.bring(P1, 1, 1)
    departures.note(7)
    assert made.moved == []
    for task in range(8, 13):
        departures.free(task)
        assert [one.kind for one in made.blocks[0].rows] == [
            Kind.MOVE,
            *[Kind.FREE, Kind.DROP] * (task == 12),
        ]
    assert rows(made)[1:] == [
        "FREE on 0: parameter 1 version 0 at 0, parameter 1 version 0 at 1 -> ",
        "DROP on 1: parameter 1 version 0 at 1 -> ",
    ]


def test_constants_come_at_once_and_weights_with_their_layer() -> None:
    first, middle, last = GRAPH.layers
    table = Ref(ValueKind.CONSTANT, 0)
    graph = replace(
        GRAPH,
        layers=(first, replace(middle, reads=(*middle.reads, table)), last),
        constants=(array("table"),),
    )
    made = Placer(graph, HERE, optimizer(1))
    made.begin()
    settle(made, THERE)
    assert rows(made) == ["MOVE on 0: constant 0 at 0 -> constant 0 at 1"]


def test_in_the_end_every_reader_of_a_parameter_has_its_newest_version() -> None:
    made = placer()
    made.buffer(P0._replace(version=3), 0, 8)
    refresh(made, [3, 0])
    assert rows(made) == ["SEND on 0: parameter 0 version 3 at 0 -> parameter 0 version 3 at 1"]


def test_a_version_may_be_overwritten_after_its_last_read() -> None:
    """PipeDream: the first of two stages reads version m - 1 of its weights in F<m> and B<m>."""
    timeline = StreamTimeline(
        GRAPH, [PlanSpan(0, layout([2, 1]))], find_schedule("pipedream"), 2, 2, drained=True
    )
    tasks = [
        Task.parse(text)
        for text in [
            "0F0",
            "0F1",
            "0B0",
            "0U0",
            "0F2",
            "0B1",
            "0U1",
            "0F3",
            "0B2",
            "0U2",
            "0B3",
            "0U3",
        ]
    ]
    last = LastReads(timeline, StreamWeights(timeline, set()), tasks)
    reads = {
        version: [n for n in range(len(tasks)) if last.after(1, 0, version, n)]
        for version in range(4)
    }
    assert {version: max(n, default=-1) + 1 for version, n in reads.items()} == {
        0: tasks.index(Task(0, Kind.B, 1)),
        1: tasks.index(Task(0, Kind.B, 2)),
        2: tasks.index(Task(0, Kind.B, 3)),
        3: 0,
    }
