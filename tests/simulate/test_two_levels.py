"""Stages as planners simulate them against the rows that the controller reads, of the same lists on
random cases.

Bytes are the same at every stage. Seconds are the same unless something is swapped: there the
stages are an approximation, and both lie between a step without copies and one that waits for each
of them (see `jvpipe.simulate.stages`). Layers hold nothing but what they keep and swap, so that
both count the same bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature, Source, Tensor
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.task import TaskLists
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.schedules import find_schedule
from jvpipe.schedules.gpipe import gpipe
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.simulator import simulate, simulate_lists
from jvpipe.simulate.stages import StageLoad
from jvpipe.simulate.timeline import Timeline
from jvpipe.simulate.work_parts import PARTS
from tests.lowering.toy import array

NO_OPTIMIZER = OptimizerCut((), (), (), jax.tree.structure(None), ())
LOSS = Ref(ValueKind.LOSS, 0)


def tensor(s: int) -> Ref:
    return Ref(ValueKind.TENSOR, s)


def chain(lists: TaskLists, loads: Sequence[StageLoad]) -> Lowered:
    """A step of one layer per stage, each of which leaves what its load keeps and swaps."""
    last, empty = len(loads) - 1, array("empty", 0)
    layers, signatures, stages = [], [], []
    plan = Plan.from_cuts([1] * len(loads))
    for s, load in enumerate(loads):
        kept, swapped = (
            replace(array(name), bytes=n)
            for name, n in (("k", load.kept_bytes), ("s", load.swapped_bytes))
        )
        reads, writes = (tensor(s - 1),) if s else (), (tensor(s),) if s < last else (LOSS,)
        layers.append(Layer(s, f"layer{s}", reads, writes, (kept, swapped)))
        sources: tuple[Source, ...] = (("residual", 0), ("residual", 1))
        signatures.append(
            Signature((kept, swapped), sources, (0,) * (s < last), (), (), (0,) * (s > 0))
        )
        fates = {f"layer{s}/s": "swap"} if load.swapped_bytes else {}
        fates |= {f"t{s}": "recompute"} if load.recompute_s else {}
        stages.append(replace(plan.stages[s], fates=fates))
    tensors = tuple(Tensor(replace(empty, name=f"t{s}"), s, (s + 1,), True) for s in range(last))
    graph = LayerGraph(tuple(layers), tensors, (), loss_bytes=0)
    layout = MicrobatchLayout.of(graph, replace(plan, stages=tuple(stages)), signatures)
    return lower_step(
        graph, [layout] * sum(task.kind is Kind.F for task in lists[0]), lists, NO_OPTIMIZER
    )


def by_rows(
    lists: TaskLists,
    loads: Sequence[StageLoad],
    *,
    shared: bool = False,
    buffers_wait: bool = False,
) -> Timeline:
    """The rows of the step, which take what the loads say on the links that stages have."""
    step = chain(lists, loads)

    def seconds(row: Row) -> float:
        if row.kind is Kind.SEND:
            load, made = loads[row.stage], step.buffers[row.writes[0]].value.kind
            return load.return_s if made is ValueKind.COTANGENT else load.send_s
        parts_s: dict[Kind, float] = dict(zip(PARTS, loads[row.stage].parts_s, strict=True))
        return parts_s.get(row.kind, 0.0)

    def links(row: Row) -> tuple[str, ...]:
        if row.kind is not Kind.SEND:
            return (f"device {row.place} host",)
        to = step.buffers[row.writes[0]].memory
        return (
            (f"device {row.place} host", f"device {to} host")
            if shared
            else (f"{row.place} to {to}",)
        )

    return simulate(step, seconds, links, buffers_wait=buffers_wait)


Numbers = tuple[list[tuple[int, ...]], bool, int]
"""Per stage: seconds of F, B, sends and returns, out, in and R; bytes kept and swapped. Whether
1F1B; micro-batches.
"""
SECONDS = (
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
    *[st.integers(0, 5)] * 3,
)
NUMBERS = st.tuples(
    st.lists(st.tuples(*SECONDS, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 6),
)
UNEQUAL_S = [
    math.sqrt(n) / 1000 for n in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
]
"""Makes all sums of seconds differ: of two transfers that are ready at the same moment either may
go first.
"""


def case_of(
    numbers: Numbers, *, swaps: bool = False, recomputes: bool = False
) -> tuple[TaskLists, list[StageLoad]]:
    """Task lists and the loads of their stages."""
    stages, early, microbatches = numbers
    loads = []
    for s, (*whole_s, out_s, in_s, again_s, kept, swapped) in enumerate(stages):
        forward_s, backward_s, send_s, return_s = (
            n + more for n, more in zip(whole_s, UNEQUAL_S[4 * s :], strict=False)
        )
        load = StageLoad(forward_s, backward_s, kept_bytes=0 if recomputes else kept)
        load = replace(
            load, send_s=send_s if s < len(stages) - 1 else 0.0, return_s=return_s if s else 0.0
        )
        if swaps and swapped:
            load = replace(load, out_s=float(out_s), in_s=float(in_s), swapped_bytes=swapped)
        if recomputes and s < len(stages) - 1:
            load = replace(load, recompute_s=float(again_s))
        loads.append(load)
    return (one_f_one_b if early else gpipe)(len(stages), microbatches), loads


def extra_s(
    lists: TaskLists, loads: Sequence[StageLoad], of: Callable[[StageLoad], float]
) -> float:
    """What all micro-batches of all stages take of something, one after another."""
    return sum(task.kind is Kind.F for task in lists[0]) * sum(map(of, loads))


@settings(max_examples=25, deadline=None)
@given(numbers=NUMBERS, shared=st.booleans())
def test_what_is_kept_takes_the_same_seconds_and_bytes(numbers: Numbers, shared: bool) -> None:
    lists, loads = case_of(numbers)
    rows, stages = (
        by_rows(lists, loads, shared=shared),
        simulate_lists(lists, loads, shared_link=shared),
    )
    assert rows.step_s == pytest.approx(stages.step_s, rel=1e-12)
    assert [c.most_bytes for c in rows.curves] == [c.most_bytes for c in stages.curves]
    assert rows.peak_bytes == stages.peak_bytes, (
        "the ledger counts the same, in the order of dispatch"
    )


@settings(max_examples=25, deadline=None)
@given(numbers=NUMBERS, shared=st.booleans())
def test_what_is_swapped_takes_the_same_bytes(numbers: Numbers, shared: bool) -> None:
    lists, loads = case_of(numbers, swaps=True)
    rows, stages = (
        by_rows(lists, loads, shared=shared),
        simulate_lists(lists, loads, shared_link=shared),
    )
    assert [c.most_bytes for c in rows.curves[:-1]] == [c.most_bytes for c in stages.curves[:-1]]


@settings(max_examples=25, deadline=None)
@given(numbers=NUMBERS)
def test_with_swaps_both_lie_between_no_copies_and_waiting_for_each(numbers: Numbers) -> None:
    lists, loads = case_of(numbers, swaps=True)
    least_s = simulate_lists(
        lists, [replace(x, out_s=0.0, in_s=0.0, swapped_bytes=0) for x in loads]
    ).step_s
    most_s = least_s + extra_s(lists, loads, lambda x: x.out_s + x.in_s)
    for found in (by_rows(lists, loads), simulate_lists(lists, loads)):
        assert least_s - 1e-9 <= found.step_s <= most_s + 1e-9


@settings(max_examples=25, deadline=None)
@given(numbers=NUMBERS)
def test_both_compute_again_while_they_wait_for_cotangents(numbers: Numbers) -> None:
    lists, loads = case_of(numbers, recomputes=True)
    rows_s, stages_s = by_rows(lists, loads).step_s, simulate_lists(lists, loads).step_s
    assert rows_s == pytest.approx(stages_s, rel=1e-12)


@pytest.mark.parametrize("stages", [2, 4])
def test_copies_are_enqueued_so_early_that_gpipe_does_not_wait_for_buffers(stages: int) -> None:
    loads = [StageLoad(1.0, 2.0, send_s=0.1, return_s=0.1, kept_bytes=1)] * stages
    free, waiting = (
        by_rows(gpipe(stages, 8), loads, buffers_wait=buffers_wait)
        for buffers_wait in (False, True)
    )
    assert waiting.step_s == pytest.approx(free.step_s, rel=1e-12)


def test_the_last_forward_of_gpipe_waits_for_all_that_leaves_and_stages_do_not_see_it() -> None:
    """F0 o0 F1 o1 f0 F2 o2 f1 f2 i0 F3: F3 waits for o2, so that there is room for i0; at stages it
    waits for o1.
    """
    loads = [StageLoad(1.0, 1.0, out_s=4.0, in_s=4.0, kept_bytes=0, swapped_bytes=1)]
    rows, stages = by_rows(gpipe(1, 4), loads), simulate_lists(gpipe(1, 4), loads)

    def start_s(found: Timeline) -> float:
        return next(
            found.starts_s[i]
            for i, t in enumerate(found.tasks)
            if (t.kind, t.microbatch) == ("F", 3)
        )

    assert (start_s(rows), start_s(stages)) == (13.0, 9.0)
    assert rows.step_s >= stages.step_s


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_streams_have_the_lists_of_1f1b_and_updates_take_no_time(name: str) -> None:
    loads = [StageLoad(1.0, 2.0, send_s=0.5)] * 2 + [StageLoad(2.0, 3.0, return_s=0.25)]
    lists = find_schedule(name).with_updates(3, 4, 8)
    assert simulate_lists(lists, loads).step_s == by_rows(one_f_one_b(3, 8), loads).step_s
