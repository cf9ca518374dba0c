"""Rows of a stream cut into steps, by hand: one weight, read by F and B, and a value from each F
for the next step's B.

rows    F0 | F1 B0 | F2 B1 | ...        each B reads what the F of the step before has left
"""

from dataclasses import replace

import pytest

from jvpipe.ir.buffers import Buffer, Lowered, Spot
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.use import Use
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.stream.period import StreamStep, Unrolled, dropping

STEPS = 4
WEIGHT = Buffer(Value(ValueKind.PARAMETER, 0, version=0), 0, 8)


def unrolled(*, ended: bool = False) -> Unrolled:
    """Buffer 0 is the weight, 1 + m what F<m> leaves."""
    left = [Buffer(Value(ValueKind.RESIDUAL, 0, 0, m), 0, 4) for m in range(STEPS)]
    rows, bounds, spots = [], [0], [{0: WEIGHT.spot}]
    for m in range(STEPS + ended):
        if m < STEPS:
            rows.append(Row(Kind.F, 0, 0, 0, m, (0,), (1 + m,)))
        if m:
            rows.append(Row(Kind.B, 0, 0, 0, m - 1, (0, m), ()))
        bounds.append(len(rows))
        spots.append({0: WEIGHT.spot, **{1 + n: left[n].spot for n in range(min(m + 1, STEPS))}})
    uses = [[Use(Kind.F, 0, m, m)] for m in range(STEPS + ended)]
    end = [(WEIGHT.spot, 0)] if ended else None
    metrics = [[]] * (STEPS + ended)
    return Unrolled(
        rows, [WEIGHT, *left], bounds, spots, uses, metrics, frozenset({0}), 1, 10**6, end
    )


def shown(step: StreamStep) -> list[str]:
    names = [str(buffer.spot) for buffer in step.lowered.buffers]
    return [
        f"{r.kind} {r.microbatch}: {[names[b] for b in r.reads]} {[names[b] for b in r.writes]}"
        for r in step.lowered.rows
    ]


def test_a_step_counts_from_its_own_beginning() -> None:
    step = unrolled().step(1)
    weight = "parameter 0 version 0 at 0"
    before, here = (
        "residual 0 layer 0 micro-batch -1 at 0",
        "residual 0 layer 0 micro-batch 0 at 0",
    )
    assert shown(step) == [f"F 0: ['{weight}'] ['{here}']", f"B -1: ['{weight}', '{before}'] []"]
    assert [str(spot) for spot in step.before] == [weight, before]
    assert step.before == step.after
    assert step.uses == (Use(Kind.F, 0, 0, 1),)


def test_steps_are_alike_once_the_pipeline_is_full() -> None:
    stream = unrolled()
    assert stream.step(0).lowered != stream.step(1).lowered
    assert stream.step(1).lowered == stream.step(2).lowered
    assert stream.step(0).after == stream.step(1).before


def test_what_stays_in_flight_is_not_freed_and_the_rest_is() -> None:
    step = unrolled().step(1).lowered
    freed = {(row.kind, str(step.buffers[b].spot)) for row in step.rows for b in row.frees}
    assert freed == {(Kind.B, "residual 0 layer 0 micro-batch -1 at 0")}
    assert len(step.final) == 2


def test_the_end_of_a_stream_leaves_what_it_says() -> None:
    stream = unrolled(ended=True)
    end = stream.step(STEPS)
    assert [row.kind for row in end.lowered.rows] == [Kind.B]
    assert [str(spot) for spot in end.after] == ["parameter 0 version 0 at 0"]


def test_a_drain_drops_what_only_a_later_step_would_have_read() -> None:
    kept, gone = (Spot(Value(ValueKind.TENSOR, i), 0) for i in (0, 1))
    made = [Buffer(spot.value, 0, 4) for spot in (kept, gone)]
    last = StreamStep(Lowered((), tuple(made), 0, (0, 1), ()), (), (gone, kept), ())
    read = Row(Kind.B, 0, 0, 0, 0, (0,), (), (0,))
    drain = StreamStep(Lowered((read,), (made[0],), 1, (), ()), (kept,), (), ())
    whole = dropping(
        drain, StreamStep(Lowered((), tuple(made[::-1]), 0, (0, 1), ()), (), last.after, ())
    )
    assert whole.before == (gone, kept)
    assert [(row.kind, row.reads, row.frees) for row in whole.lowered.rows] == [
        (Kind.DROP, (0,), (0,)),
        (Kind.B, (1,), (1,)),
    ]
    assert whole.lowered.rows[0].layer == NONE


def test_a_row_that_reads_what_nobody_made_is_a_fault_of_ours() -> None:
    stream = unrolled()
    broken = replace(stream, rows=[Row(Kind.B, 0, 0, 0, 0, (4,), ()), *stream.rows[1:]])
    with pytest.raises(AssertionError, match="reads only buffers that exist"):
        broken.step(0)
