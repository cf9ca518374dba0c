"""A compiled plan: its steps are bound once, and a stream is alike from where it repeats itself."""

from dataclasses import replace

import pytest

import jvpipe
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.schedules import TwoBW
from tests.session.tiny import HERE, MICRO, THERE, begun


@pytest.fixture(scope="module")
def stream() -> CompiledPlan:
    return begun(schedule="pipedream")[0].session.compiled


def test_a_synchronous_step_is_lowered_once_and_its_peaks_are_those_of_its_rows() -> None:
    compiled = begun()[0].session.compiled
    assert compiled.step is compiled.step
    assert compiled.peaks == compiled.peaks_of(compiled.step)
    assert len(compiled.peaks) == 3, "two devices and the host"
    used = {device for _, device in compiled.executables}
    assert used == set(compiled.devices)


def test_only_the_last_micro_batch_of_except_last_keeps_all() -> None:
    compiled = begun(checkpoint="except_last")[0].session.compiled
    first, last = compiled.layouts(first=4)
    assert (first.number, last.number) == (4, 5)
    recomputed, kept = (set(layout.fates.recomputed) for layout in (first, last))
    assert recomputed > kept == set()
    with pytest.raises(ValueError, match="checkpoint='except_last' means nothing under pipedream"):
        begun(schedule="pipedream", checkpoint="except_last")


def test_a_stream_that_repeats_itself_runs_the_same_rows_for_ever(stream: CompiledPlan) -> None:
    steps = len(stream.stream.steps)
    assert stream.stream_step(steps - 1) is stream.stream_step(steps + 100)
    assert stream.drain(steps) is stream.drain(steps + 100)
    assert [stream.representative(n) for n in (0, 1, steps, steps + 1, steps + 100)] == [
        0,
        1,
        steps,
        steps,
        steps,
    ]


def test_a_drain_begins_with_what_the_step_before_left(stream: CompiledPlan) -> None:
    for steps in range(1, len(stream.stream.steps) + 1):
        drain, bound = stream.drain(steps)
        assert drain.before == stream.stream.steps[steps - 1].after
        assert bound.lowered.persistent == len(drain.before)


def test_the_plan_before_is_dropped_once_nothing_of_it_is_in_flight(stream: CompiledPlan) -> None:
    assert stream.without_previous(3) == (stream, 3)
    pipe, _ = begun(HERE, schedule="pipedream")
    there = pipe.session.compiled_plans.with_plan(THERE)
    moved = replace(there, previous=(pipe.session.compiled, 2 * MICRO))
    assert [(span.start, span.layout.plan.cuts) for span in moved.spans] == [
        (0, HERE.cuts),
        (4, THERE.cuts),
    ]
    assert moved.stream.switch_step == 2
    assert moved.without_previous(2) == (moved, 2), "the step of the move is still to come"
    alone, steps = moved.without_previous(len(moved.stream.steps))
    assert (alone.previous, steps) == (None, len(alone.stream.steps))


def test_a_schedule_that_the_plan_does_not_fit_is_refused(stream: CompiledPlan) -> None:
    with pytest.raises(
        ValueError, match="2bw on 3 stages needs at least 3 micro-batches, but 2 are given"
    ):
        replace(stream, schedule=TwoBW(), plan=jvpipe.Plan.from_cuts([1, 1, 1], devices=[0, 1, 0]))
