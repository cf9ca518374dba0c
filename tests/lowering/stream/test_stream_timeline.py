"""The timeline of a stream: which version is read after a change of stages, and what must be done
for it.
"""

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.stream.stream_timeline import PlanSpan, StreamTimeline
from jvpipe.schedules import Schedule, find_schedule
from tests.lowering.test_step import lowered

M = 4


def timeline(
    schedule: Schedule, *cuts_from: tuple[int, list[int]], steps: int = 5
) -> StreamTimeline:
    """Of a small chain of layers, under these cuts from these micro-batches on."""
    graph, *_ = lowered("mlp", 1, "1f1b")
    spans = [
        PlanSpan(start, MicrobatchLayout.of(graph, Plan.from_cuts(cuts), [], n))
        for n, (start, cuts) in enumerate(cuts_from)
    ]
    return StreamTimeline(graph, spans, schedule, M, steps, drained=False)


def test_a_layer_reads_what_the_rule_of_its_new_stage_says() -> None:
    """PipeDream, two stages: S - 1 - s updates behind; layer 1 moves from the first stage to the
    last at 9.
    """
    found = timeline(find_schedule("pipedream"), (0, [2, 3]), (9, [1, 4]))
    assert [found.version(1, m, back=False) for m in range(7, 12)] == [6, 7, 9, 10, 11]
    assert [found.version(1, m, back=True) for m in range(7, 12)] == [6, 7, 9, 10, 11]
    assert Task(0, Kind.U, 8) in found.versions(
        Task(1, Kind.F, 9)
    )  # which then was made on its old stage
    assert list(found.versions(Task(1, Kind.F, 10))) == []


def test_nothing_is_read_that_is_gone() -> None:
    """From the last stage to the first of three: what the rule would say has been overwritten."""
    found = timeline(find_schedule("pipedream"), (0, [1, 1, 3]), (8, [3, 1, 1]))
    read = [found.version(2, m, back=False) for m in range(7, 13)]
    assert read == [7, 8, 8, 8, 9, 10]
    rule = [max(0, m - 2) for m in range(7, 13)]
    assert all(v >= r for v, r in zip(read, rule, strict=True))


def test_a_step_does_what_its_forwards_need() -> None:
    """A layer goes to the last stage: its forward there waits for an update that would have come a
    step later.
    """
    found = timeline(find_schedule("pipedream"), (0, [3, 1, 1]), (11, [1, 1, 3]))
    for n, part in enumerate(found.parts[:-1]):
        done = {task for earlier in found.parts[: n + 1] for tasks in earlier for task in tasks}
        for tasks in part:
            for task in tasks:
                assert done.issuperset(found.waits(task)), task
                assert done.issuperset(found.versions(task)), task
    plain = timeline(find_schedule("pipedream"), (0, [3, 1, 1]))
    assert found.parts[:2] == plain.parts[:2]
    assert found.parts[2] != plain.parts[2]
