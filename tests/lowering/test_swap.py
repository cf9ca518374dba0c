"""When swapped values go out, when their room is free, when they come back: drawn by hand for the
first of 3 stages.
"""

from itertools import groupby

import optax
import pytest

from jvpipe.ir.buffers import Copy, Lowered
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
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


def test_the_last_stage_of_1f1b_swaps_nothing() -> None:
    rows = [row for row in swapped("1f1b").rows if row.place == 2]
    assert not [row for row in rows if row.kind in ("OUT", "FREE", "IN")]
