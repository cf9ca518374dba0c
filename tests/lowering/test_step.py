"""Lowered steps: every buffer is there when it is read and gone after its last use; copies go
straight.
"""

from collections import Counter

import optax
import pytest

from jvpipe.ir.buffers import Lowered, peaks
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import Owner, Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_evaluation, lower_step
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.optimizer_pieces import cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.schedules import find_schedule
from jvpipe.trace.graph import build_graph
from jvpipe.trace.leaves import abstract
from jvpipe.trace.loss import trace_loss
from tests.zoo import CASES, Case


def lowered(
    name: str, stages: int, schedule: str, micro: int = 4
) -> tuple[LayerGraph, Plan, Lowered]:
    return lowered_case(CASES[name](), stages, schedule, micro)


def lowered_case(
    m: Case, stages: int, schedule: str, micro: int = 4
) -> tuple[LayerGraph, Plan, Lowered]:
    traced = build_graph(
        trace_loss(
            m.loss_fn, m.params, m.batch, m.rng, m.state, has_aux=m.has_aux, has_state=m.has_state
        )
    )
    graph = traced.graph
    optimizer = cut_optimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        abstract(m.params),
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
        microbatches=None if graph.weighted else micro,
    )
    each, more = divmod(len(graph.layers), stages)
    plan = Plan.from_cuts([each + (s < more) for s in range(stages)])
    signatures = [p.signature for p in layer_programs(shared_store(), traced)]
    lists = find_schedule(schedule).lists(stages, micro)
    return (
        graph,
        plan,
        lower_step(graph, [MicrobatchLayout.of(graph, plan, signatures)] * micro, lists, optimizer),
    )


CASES_HERE = [
    ("pre-norm", 3, "1f1b"),
    ("resnet", 2, "gpipe"),
    ("three-readers", 4, "1f1b"),
    ("unused", 2, "1f1b"),
]


@pytest.mark.parametrize(("name", "stages", "schedule"), CASES_HERE)
def test_buffers_live_from_their_making_to_their_last_use(
    name: str, stages: int, schedule: str
) -> None:
    _, _, step = lowered(name, stages, schedule)
    alive = set(range(step.persistent))
    for row in step.rows:
        assert alive.issuperset(row.reads), f"{row} reads what is not there"
        assert all(step.buffers[b].memory == row.place for b in row.reads), (
            f"{row} reads from another device"
        )
        if row.kind != "SEND":
            assert all(step.buffers[b].memory == row.place for b in row.writes)
        alive |= set(row.writes)
        assert alive.issuperset(row.frees)
        alive -= set(row.frees)
    assert alive == {*step.final, *step.metrics}


@pytest.mark.parametrize(("name", "stages", "schedule"), CASES_HERE)
def test_every_task_is_there_once_and_copies_cross_devices(
    name: str, stages: int, schedule: str
) -> None:
    graph, _, step = lowered(name, stages, schedule)
    tasks = Counter((row.kind, row.layer, row.microbatch) for row in step.rows if row.kind in "FB")
    assert tasks == Counter(
        (kind, layer.id, m) for kind in "FB" for layer in graph.layers for m in range(4)
    )
    for row in step.rows:
        if row.kind == "SEND":
            (source,), (target,) = row.reads, row.writes
            assert step.buffers[source].place != step.buffers[target].place
            assert step.buffers[source].bytes == step.buffers[target].bytes
    sent = Counter(step.buffers[row.writes[0]].spot for row in step.rows if row.kind == "SEND")
    assert max(sent.values(), default=1) == 1


def test_1f1b_keeps_fewer_micro_batches_in_flight_than_gpipe() -> None:
    def in_flight(schedule: str) -> list[int]:
        _, plan, step = lowered("mlp", 3, schedule, micro=6)
        most = [0] * 3
        now: Counter[int] = Counter()
        first = {stage.layers[0]: s for s, stage in enumerate(plan.stages)}
        for row in step.rows:
            if row.layer in first and row.kind in "FB":
                now[row.stage] += 1 if row.kind == "F" else -1
                most[row.stage] = max(most[row.stage], now[row.stage])
        return most

    assert in_flight("1f1b") == [3, 2, 1]
    assert in_flight("gpipe") == [6, 6, 6]


def test_gradients_are_added_in_ascending_order_and_the_last_reader_first() -> None:
    graph, _, step = lowered("three-readers", 4, "1f1b")
    for layer in graph.layers:
        order = [row.microbatch for row in step.rows if row.kind == "B" and row.layer == layer.id]
        assert order == sorted(order)
    shared = next(i for i, t in enumerate(graph.tensors) if len(t.readers) >= 3)
    cotangent = Value(ValueKind.COTANGENT, shared, microbatch=0)
    writers = [
        row.layer
        for row in step.rows
        if row.kind is Kind.B and cotangent in {step.buffers[b].value for b in row.writes}
    ]
    assert writers == sorted(graph.tensors[shared].readers, reverse=True)


def test_a_tied_parameter_has_a_copy_per_device_and_one_owner() -> None:
    graph, _, step = lowered("pre-norm", 3, "1f1b")
    (tied,) = [i for i, p in enumerate(graph.parameters) if len(p.readers) > 1]
    copies = [
        b for b in step.buffers[: step.persistent] if b.value[:2] == (ValueKind.PARAMETER, tied)
    ]
    assert len(copies) == 2
    moments = [
        b
        for b in step.buffers[: step.persistent]
        if b.owner is Owner.OPTIMIZER and b.bytes == copies[0].bytes
    ]
    assert {b.place for b in moments if b.value.layer == graph.parameters[tied].owner} == {
        copies[0].place
    }


def test_peaks_say_who_holds_what() -> None:
    _, _, step = lowered("mlp", 2, "1f1b")
    for d, peak in enumerate(peaks(step, 2)):
        assert peak.bytes == sum(size for _, size in peak.holders)
        assert peak.row is None or peak.row.place == d
    persistent = sum(b.bytes for b in step.buffers[: step.persistent] if b.place == 0)
    assert peaks(step, 2)[0].bytes > persistent


def test_an_evaluation_leaves_everything_as_it_was() -> None:
    m = CASES["resnet"]()
    traced = build_graph(trace_loss(m.loss_fn, m.params, m.batch, m.rng, m.state, has_state=True))
    graph = traced.graph
    optimizer = cut_optimizer(
        optax.sgd(0.1),
        abstract(m.params),
        [p.owner for p in graph.parameters],
        [1] * len(graph.parameters),
        microbatches=4,
    )
    plan = Plan.from_cuts([2, len(graph.layers) - 2])
    step = lower_evaluation(graph, plan, optimizer, 4)
    assert step.final == tuple(range(step.persistent))
    assert not {row.kind for row in step.rows} & {"F", "B", "U", "ZERO"}
    assert all(b not in range(step.persistent) for row in step.rows for b in row.writes)
