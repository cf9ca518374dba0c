"""Planners on devices of several stages: what a device holds is what the simulator sees, and limits
hold per device.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import Link
from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import (
    forecast,
    simulated_bubble_fraction,
    simulated_step_s,
)
from jvpipe.planners.model.unfolded import unfolded
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.schedule import Schedule
from tests.grid import grid
from tests.planners.small import chain

FAMILIES = [
    *(find_schedule(name) for name in ("interleaved", "zb-h1", "zb-v", "v-half")),
    *(Interleaved(chunks=3), Interleaved(split=True)),
]


def layer(
    forward_s: float = 1.0, kept: int = 8, split: SplitCost | None = None, temporary: int = 0
) -> LayerCost:
    options = (Option(kept), Option(0, extra_s=forward_s, extra_bytes=kept))
    return LayerCost("layer", forward_s, 2 * forward_s, options, 2, 2, 2, 1, temporary, split)


def problem_of(
    layers: list[LayerCost], schedule: Schedule, devices: int, microbatches: int
) -> Problem:
    edges = tuple(Edge(i, (i + 1,), 0) for i in range(len(layers) - 1))
    return Problem(Costs(tuple(layers), edges), devices * schedule.chunks, schedule, microbatches)


NUMBERS = st.tuples(
    st.integers(1, 4), st.integers(0, 9), st.booleans(), st.integers(0, 9), st.integers(0, 9)
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(1, 3), st.integers(1, 7), st.data())
def test_a_device_holds_what_its_forecast_shows(
    schedule: Schedule, devices: int, m: int, data: st.DataObject
) -> None:
    V = devices * schedule.chunks
    numbers = data.draw(st.lists(NUMBERS, min_size=V, max_size=2 * V))
    splits = (SplitCost(1.0, 1.5, n[3], n[4]) if n[2] else None for n in numbers)
    layers = [layer(float(n[0]), n[1], split) for n, split in zip(numbers, splits, strict=True)]
    problem = problem_of(layers, schedule, devices, m)
    decision = find_planner("even").decide(problem)
    found, evaluation = forecast(problem, decision), evaluate_decision(problem, decision)
    assert found.step_s == pytest.approx(simulated_step_s(problem, evaluation.stages))
    assert found.bubble_fraction == pytest.approx(
        simulated_bubble_fraction(problem, evaluation.stages)
    )
    for most, peak in zip(evaluation.device_bytes, found.peak_bytes, strict=False):
        assert (
            most <= peak
        )  # the forecast counts what each stage works with all the time, not that of one at a time
        beyond = [stage.held.beyond for stage in evaluation.stages if stage.held]
        assert peak - most <= sum(beyond)


def decided(problem: Problem, limit: int) -> tuple[int, int]:
    """The limit and what the fullest device holds; for a limit that no plan keeps, those of the
    limit that the planner says would do.
    """
    tight = replace(problem, memory_limit_bytes=limit)
    try:
        return limit, evaluate_decision(tight, find_planner("jvpipe").decide(tight)).peak_bytes
    except Infeasible as error:
        return decided(problem, error.smallest_limit_bytes)


@pytest.mark.parametrize(
    "schedule", grid(FAMILIES, *FAMILIES[::2]), ids=lambda schedule: schedule.name
)
def test_limits_hold_for_all_stages_of_a_device_together(schedule: Schedule) -> None:
    problem = problem_of([layer(1.0 + i % 3) for i in range(8)], schedule, 2, 6)
    free = evaluate_decision(problem, find_planner("jvpipe").decide(problem)).peak_bytes
    for limit in (free, int(0.8 * free)):
        found, peak = decided(problem, limit)
        assert peak <= found == limit
    found, peak = decided(problem, 1)
    assert 1 < peak <= found < free


def test_a_limit_that_no_plan_keeps_is_refused_with_one_that_would_do() -> None:
    problem = problem_of([layer(1.0 + i % 3) for i in range(8)], find_schedule("v-half"), 2, 6)
    with pytest.raises(Infeasible) as caught:
        find_planner("jvpipe").decide(replace(problem, memory_limit_bytes=1))
    assert f"limit that would do is {caught.value.smallest_limit_bytes} bytes" in str(caught.value)


def test_halves_of_a_layer_without_a_cotangent_are_in_the_second_task() -> None:
    split = SplitCost(1.5, 0.5, handed_bytes=3, kept_bytes=4)
    problem = problem_of(
        [layer(split=split), layer(split=split), layer()], find_schedule("zb-h1"), 1, 4
    )
    (stage,) = evaluate_decision(problem, Decision.keeping_all((0, 3))).stages
    assert stage.halves_s == (0.0, 0.0)  # on one device backwards are whole
    problem = problem_of(
        [layer(split=split), layer(split=split), layer()], find_schedule("zb-h1"), 3, 4
    )
    stages = evaluate_decision(problem, Decision.keeping_all((0, 1, 2, 3))).stages
    assert [x.halves_s for x in stages] == [(0.0, 2.0), (1.5, 0.5), (2.0, 0.0)]
    assert [x.held.handed if x.held else None for x in stages] == [9, 7, 0]


def test_stages_must_be_a_multiple_of_chunks() -> None:
    costs = Costs((layer(),) * 6)
    with pytest.raises(
        ValueError,
        match="5 stages: interleaved has 2 per device, so that there must be a multiple of 2",
    ):
        Problem(costs, 5, find_schedule("interleaved"), 4)
    with pytest.raises(
        ValueError,
        match=r"interleaved needs 2 x 4 = 8 stages, but the model has 6 layers: one chunk per",
    ):
        Problem(costs, 8, find_schedule("interleaved"), 4)


@pytest.mark.parametrize(
    "schedule", FAMILIES, ids=lambda schedule: f"{schedule.name} {schedule.chunks}"
)
def test_a_planner_that_looks_at_no_limit_answers_as_without_one(schedule: Schedule) -> None:
    problem = problem_of([layer()] * 12, schedule, 2, 4)
    for planner in ("even", "torchgpipe", "gpipe"):
        decide = find_planner(planner).decide
        assert decide(replace(problem, memory_limit_bytes=10)) == decide(problem)


def on_links(schedule: str) -> Problem:
    """Six layers on three unlike devices; the links between them carry 2 and 1 bytes a second."""
    problem = chain([layer()] * 6, 6, 4, schedule, peer=Link(4.0))
    apart = problem.told_apart([(), (2.0,) * 6, (3.0,) * 6], [])
    links = [Link(9.0), Link(2.0), Link(1.0)]
    groups = [replace(x, receives=y) for x, y in zip(apart.groups, links, strict=True)]
    return replace(apart, groups=tuple(groups))


def test_at_the_turn_of_a_vee_nothing_is_sent() -> None:
    problem = chain([layer()] * 6, 6, 4, "zb-v", peer=Link(2.0, 1.0))
    stages = evaluate_decision(problem, Decision.keeping_all(range(7))).stages
    assert [stage.comm_s for stage in stages] == [0, 3, 3, 0, 3, 3]
    assert [stage.link_s for stage in stages] == [2, 3, 2, 2, 3, 2], "copies of both directions"
    segments, ends = Segments(problem), np.arange(7)
    for s, stage in enumerate(stages):
        block = segments.block(s, ends, ends)
        assert (block.comm_s[s, s + 1], block.traffic_s[s, s + 1]) == (stage.comm_s, stage.link_s)


@pytest.mark.parametrize("problem", [on_links("zb-v"), chain([layer()] * 6, 6, 4, "zb-v")])
def test_unfolded_stages_keep_their_links(problem: Problem) -> None:
    problem = replace(problem, peer=Link(4.0))
    decision = Decision.keeping_all(range(7))
    apart = unfolded(problem)
    found, wanted = (evaluate_decision(x, decision).stages for x in (apart, problem))
    assert [x.comm_s for x in found] == [x.comm_s for x in wanted]
    assert [x.link_s for x in found] == [x.link_s for x in wanted]
    kept = KeptStages(apart)
    for s, stage in enumerate(wanted):
        assert kept.comm_s(s)[s, s + 1] == stage.comm_s
        assert kept.seconds(s)[s, s + 1] == stage.seconds


def test_devices_that_are_alike_stay_so_in_a_loop() -> None:
    assert not unfolded(chain([layer()] * 6, 6, 4, "interleaved", peer=Link(4.0))).groups
