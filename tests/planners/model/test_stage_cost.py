"""The surrogate is held to the one clock: where stages are alike and send in no time, both are the
same.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "interleaved", "pipedream", "2bw"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_alike_stages_take_what_the_simulator_says(
    name: str, devices: int, turns: int, forward_s: int, backward_s: int
) -> None:
    schedule = find_schedule(name)
    stages = schedule.stages_on(devices)
    layer = LayerCost("layer", float(forward_s), float(backward_s), (Option(1),))
    edges = tuple(Edge(at, (at + 1,), 1) for at in range(stages - 1))
    costs = Costs((layer,) * stages, edges)
    # Chunks leave no gaps where micro-batches go round in whole turns.
    problem = Problem(costs, stages, schedule, turns * devices)
    evaluation = evaluate_decision(problem, Decision.keeping_all(range(stages + 1)))
    simulated_s = simulated_step_s(problem, evaluation.stages)
    assert evaluation.step_s == pytest.approx(simulated_s)
