"""When swapped values go out, when their room is free, when they come back: drawn by hand for the
first of 3 stages.
"""

from itertools import groupby

import optax
import pytest

from jvpipe.ir.buffers import Buffer, Copy, Lowered
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.carrier import Block
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.lowering.swap import swap
from jvpipe.planners.user_fates import with_fates
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.optimizer_pieces import cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.schedules import find_schedule
from jvpipe.trace.leaves import abstract
from jvpipe.trace.model import trace_model
from tests.zoo import CASES

LETTERS = {"F": "F", "B": "B", "OUT": "o", "FREE": "f", "IN": "i"}
DRAWN = {
    "1f1b": "F0 o0 F1 o1 f0 f1 i0 F2 o2 B0 f2 i1 F3 o3 B1 f3 i2 F4 o4 f4 i3 B2 i4 B3 B4",
    "gpipe": "F0 o0 F1 o1 f0 F2 o2 f1 F3 o3 f2 f3 i0 F4 o4 f4 i1 B0 i2 B1 i3 B2 i4 B3 B4",
}


def swapped(schedule: str, stages: int = 3, micro: int = 5) -> Lowered:
    """A step in which everything that may be swapped is."""
    m = CASES["mlp"]()
    traced = trace_model(m.loss_fn, m.params, m.batch, m.rng).traced
    graph = traced.graph
    owners, readers = (
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
    )
    optimizer = cut_optimizer(
        optax.sgd(0.1), abstract(m.params), owners, readers, microbatches=micro
    )
    each, more = divmod(len(graph.layers), stages)
    plan = with_fates(
        graph, Plan.from_cuts([each + (s < more) for s in range(stages)]), {"*": "swap"}
    )
    signatures = [
        p.signature for p in layer_programs(shared_store(), traced, Fates.of(graph, plan))
    ]
    return lower_step(
        graph,
        [MicrobatchLayout.of(graph, plan, signatures)] * micro,
        find_schedule(schedule).lists(stages, micro),
        optimizer,
    )


@pytest.mark.parametrize("schedule", DRAWN)
def test_rows_are_as_drawn(schedule: str) -> None:
    every = swapped(schedule).rows
    rows = [row for row in every if row.place == 0 and row.kind in LETTERS]
    found = [f"{LETTERS[row.kind]}{row.microbatch}" for row in rows]
    assert " ".join(text for text, _ in groupby(found)) == DRAWN[schedule]


@pytest.mark.parametrize("schedule", DRAWN)
def test_two_micro_batches_of_swapped_values_at_most(schedule: str) -> None:
    step = swapped(schedule)
    names = [
        buffer.spot._replace(copy=Copy.OWN) if buffer.copy is Copy.FETCHED else buffer.spot
        for buffer in step.buffers
    ]
    out = {names[row.reads[0]] for row in step.rows if row.kind is Kind.OUT}
    live: set[int] = set()
    most = 0
    for born, dead in step.changes():
        live |= set(born)
        here = [names[b] for b in live if names[b] in out and step.buffers[b].memory == 0]
        most = max(most, len({spot.value.microbatch for spot in here}))
        live -= set(dead)
    assert most == 2


def test_two_sets_at_most_where_backwards_are_in_halves() -> None:
    """Each of F3 to F5 comes before a W, whose values are back already: older sets must make room all the same."""
    order = "F0 F1 F2 I0 I1 I2 F3 W0 F4 W1 F5 W2 I3 W3 I4 W4 I5 W5"
    tasks = tuple(Task.parse(f"0{text}") for text in order.split())
    buffers = [Buffer(Value(ValueKind.RESIDUAL, 0, 0, m), 0, 4) for m in range(6)]
    blocks = [
        Block(task, [Row(task.kind, 0, 0, 0, task.microbatch, (task.microbatch,), ())])
        for task in tasks
    ]
    held: set[int] = set()
    brought = []
    for block in swap(blocks, buffers, (tasks,), lambda task: (0, [task.microbatch])):
        for row in block:
            if row.kind in (Kind.F, Kind.IN):
                held.add(row.microbatch)
                assert len(held) <= 2, f"before {row}"
            elif row.kind in (Kind.FREE, Kind.I):
                held.discard(row.microbatch)
            brought += [row.microbatch] * (row.kind is Kind.IN)
    assert brought == [0, 1, 2, 3, 4, 5], "once each: the second half reads what the first one did"


def test_the_last_stage_of_1f1b_swaps_nothing() -> None:
    rows = [row for row in swapped("1f1b").rows if row.place == 2]
    assert not [row for row in rows if row.kind in ("OUT", "FREE", "IN")]
