"""What planners are told: the same as the simulator says, and right for streams."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.ir.kinds import Kind
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import (
    forecast,
    least_steps_s,
    simulated_bubble_fraction,
    simulated_step_s,
)
from jvpipe.schedules import SCHEDULES, find_schedule
from tests.planners.joint.enumeration import tiny
from tests.planners.small import SCHEDULES as SMALL_SCHEDULES


def layer(forward_s: float, backward_s: float, size: int = 4) -> LayerCost:
    options = (Option(size), Option(0, size), Option(0, 0, forward_s / 2))
    return LayerCost(
        "layer", forward_s, backward_s, options, 3, 3, 6, input_bytes=2, temporary_bytes=1
    )


Numbers = tuple[list[list[tuple[int, int, int, int, int]]], str, int, Link, Link, bool]
NUMBERS = st.tuples(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(1, 5),
                st.integers(1, 9),
                st.integers(0, 8),
                st.integers(0, 4),
                st.integers(RECOMPUTE, 2),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(sorted(name for name, one in SCHEDULES.items() if one.chunks == 1)),
    st.integers(1, 7),
    st.sampled_from([INFINITE, Link(2.0), Link(8.0, 0.25)]),
    st.sampled_from([INFINITE, Link(4.0), Link(1.0)]),
    st.booleans(),
)


def planned(numbers: Numbers) -> tuple[Problem, Decision]:
    """A problem and a decision from per stage, per layer: seconds of F and B, sizes of residual and
    edge, choice.
    """
    stages, schedule, microbatches, host, peer, shared = numbers
    flat = [one for stage in stages for one in stage]
    layers = tuple(layer(float(f), float(b), size) for f, b, size, _, _ in flat)
    edges = tuple(Edge(i, (i + 1,), one[3]) for i, one in enumerate(flat[:-1]))
    problem = Problem(
        Costs(layers, edges),
        len(stages),
        find_schedule(schedule),
        microbatches,
        host=host,
        peer=peer,
        peer_uses_host=shared,
    )
    return problem, Decision((0, *accumulate(map(len, stages))), tuple(one[4] for one in flat))


@settings(max_examples=25, deadline=None)
@given(NUMBERS)
def test_planners_are_told_what_the_simulator_says(numbers: Numbers) -> None:
    problem, decision = planned(numbers)
    stages = evaluate_decision(problem, decision).stages
    timeline = forecast(problem, decision)
    if problem.schedule.synchronous:
        assert simulated_step_s(problem, stages) == timeline.step_s
        assert simulated_bubble_fraction(problem, stages) == pytest.approx(timeline.bubble_fraction)
    *devices, host = timeline.curves
    assert all(
        curve.most_bytes <= stage.peak_bytes for curve, stage in zip(devices, stages, strict=True)
    )
    assert host.most_bytes <= sum(stage.host_bytes for stage in stages)


@settings(max_examples=25, deadline=None)
@given(NUMBERS)
def test_no_stage_and_no_link_is_faster_than_its_work(numbers: Numbers) -> None:
    problem, decision = planned(numbers)
    stages = evaluate_decision(problem, decision).stages
    least = problem.microbatches * max(stage.compute_s for stage in stages)
    assert simulated_step_s(problem, stages) >= least * (1 - 1e-9)


@pytest.mark.parametrize(("name", "step_s"), [("1f1b", 33), ("gpipe", 33), ("pipedream", 24)])
def test_an_update_comes_behind_a_step_and_within_a_stream(name: str, step_s: float) -> None:
    """(M + S - 1) (F + B) and one update; each micro-batch of a stream has its own."""
    costs = Costs((replace(layer(1.0, 2.0), update_s=0.5),) * 4)
    problem = Problem(costs, 4, find_schedule(name), 8)
    decision = Decision.keeping_all([0, 1, 2, 3, 4])
    stages = evaluate_decision(problem, decision).stages
    updates = 8 if name == "pipedream" else 1
    assert simulated_step_s(problem, stages) == step_s + 0.5 * updates
    busy_s = 8 * 3.0 + 0.5 * updates
    assert simulated_bubble_fraction(problem, stages) == pytest.approx(
        1 - busy_s / (step_s + 0.5 * updates)
    )
    spans = [span for span in forecast(problem, decision).spans() if span.kind == Kind.U]
    assert len(spans) == 4 * updates * (1 if updates == 1 else 2)


@settings(max_examples=20, deadline=None)
@given(NUMBERS)
def test_a_stream_is_timed_where_it_is_steady(numbers: Numbers) -> None:
    """A stream twice as long takes as much longer as its further micro-batches.

    To 5%: on a shared link stages may take turns over more micro-batches than a forecast looks at.
    """
    problem, decision = planned(numbers)
    problem = replace(problem, schedule=find_schedule("pipedream"))
    stages = evaluate_decision(problem, decision).stages
    long, longer = (
        replace(problem, schedule=find_schedule("1f1b"), microbatches=m) for m in (200, 400)
    )
    rate_s = (simulated_step_s(longer, stages) - simulated_step_s(long, stages)) / 200
    assert simulated_step_s(problem, stages) == pytest.approx(
        problem.microbatches * rate_s, rel=0.05
    )


def test_a_stream_has_no_bubble_where_stages_are_equal() -> None:
    problem = Problem(Costs((layer(1.0, 2.0),) * 4), 4, find_schedule("pipedream"), 8)
    stages = evaluate_decision(problem, Decision.keeping_all([0, 1, 2, 3, 4])).stages
    assert simulated_step_s(problem, stages) == 24.0
    assert simulated_bubble_fraction(problem, stages) == pytest.approx(0.0)


def test_no_bubble_is_below_zero_by_rounding() -> None:
    problem = Problem(Costs((layer(0.77, 1.54),) * 2), 2, find_schedule("pipedream"), 4)
    decision = Decision.keeping_all([0, 1, 2])
    stages = evaluate_decision(problem, decision).stages
    assert 0.0 <= simulated_bubble_fraction(problem, stages) < 1e-9
    assert forecast(problem, decision).bubble_fraction >= 0.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream"])
def test_the_forecast_reaches_the_peak_that_is_planned_with(name: str) -> None:
    layers = (layer(1.0, 2.0),) * 6
    problem = Problem(Costs(layers), 3, find_schedule(name), 6, host=Link(8.0))
    for choices in [(0,) * 6, (2, 0) * 3, (1, 1) * 3, (RECOMPUTE, 1) * 3]:
        decision = Decision((0, 2, 4, 6), choices)
        stages = evaluate_decision(problem, decision).stages
        assert forecast(problem, decision).peak_bytes[:3] == tuple(
            stage.peak_bytes for stage in stages
        )


def test_a_send_takes_half_of_what_a_stage_exchanges() -> None:
    costs = Costs((layer(1.0, 1.0), layer(1.0, 1.0)), (Edge(0, (1,), 6),))
    problem = Problem(costs, 2, find_schedule("1f1b"), 1, peer=Link(2.0), peer_uses_host=False)
    assert (
        simulated_step_s(
            problem, evaluate_decision(problem, Decision.keeping_all([0, 1, 2])).stages
        )
        == 1 + 3 + 2 + 3 + 1
    )


@pytest.mark.parametrize("name", SMALL_SCHEDULES)
def test_the_simulator_is_not_below_the_least_of_many_steps(name: str) -> None:
    problem = tiny(0, name)
    again = (RECOMPUTE, RECOMPUTE_CHAIN) * 2
    for choices in ((0, 0, 0, 0), (1, 0, 1, 0), (2, RECOMPUTE, 1, 3), again):
        for cut in (2,) if choices == again else (1, 2, 3):
            stages = evaluate_decision(problem, Decision((0, cut, 4), choices)).stages
            parts_s = np.array([stage.load().parts_s for stage in stages])[:, :, None].repeat(
                3, axis=2
            )
            link_s = np.array([[stage.link_s] * 3 for stage in stages])
            parts_s[1, 1, 1] = np.inf
            least_s, impossible, again_s = least_steps_s(problem, parts_s, link_s)
            assert least_s == again_s
            assert 0 < least_s <= simulated_step_s(problem, stages) * (1 + 1e-9)
            assert impossible == np.inf
