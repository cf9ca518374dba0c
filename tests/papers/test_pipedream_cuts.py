"""PipeDream's planner without replicas: the exact optimum for the slowest stage, under its
memory.
"""

import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.pipedream_cuts import pipedream
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule
from tests.planners.small import cuts, limited, problems


@settings(max_examples=30, deadline=None)
@given(problems(most_layers=7))
def test_no_cuts_that_fit_have_a_faster_slowest_stage(problem: Problem) -> None:
    limit = problem.memory_limit_bytes
    assert limit is not None
    every = [evaluate_decision(problem, Decision.keeping_all(bounds)) for bounds in cuts(problem)]
    fitting = [evaluation.bottleneck_s for evaluation in every if evaluation.peak_bytes <= limit]
    if fitting:
        decision = pipedream(problem)
        evaluation = evaluate_decision(problem, decision)
        assert evaluation.bottleneck_s == pytest.approx(min(fitting))
        assert evaluation.peak_bytes <= limit
        assert set(decision.choices) == {0}
    else:
        with pytest.raises(Infeasible) as caught:
            pipedream(problem)
        smallest = min(evaluation.peak_bytes for evaluation in every)
        assert caught.value.smallest_limit_bytes == smallest
        assert (
            evaluate_decision(problem, pipedream(limited(problem, smallest))).peak_bytes == smallest
        )


def test_a_stage_holds_a_version_and_the_activations_for_each_stage_from_it_on() -> None:
    layers = (LayerCost("layer", 1.0, 1.0, (Option(10),), parameter_bytes=100),) * 6
    unlimited = Problem(Costs(layers), 3, find_schedule("pipedream"), 8)
    assert pipedream(unlimited).bounds == (0, 2, 4, 6)
    assert [s.peak_bytes for s in evaluate_decision(unlimited, pipedream(unlimited)).stages] == [
        660,
        440,
        220,
    ]
    for limit in (659, 440):
        assert pipedream(limited(unlimited, limit)).bounds == (0, 1, 3, 6)
    with pytest.raises(Infeasible, match="pipedream keeps every activation") as caught:
        pipedream(limited(unlimited, 439))
    assert caught.value.smallest_limit_bytes == 440


def test_a_slow_transfer_is_the_bottleneck_that_cuts_avoid() -> None:
    layers = (LayerCost("layer", 1.0, 1.0, (Option(10),)),) * 4
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 100), Edge(2, (3,), 1))
    fast = Problem(
        Costs(layers, edges),
        2,
        find_schedule("pipedream"),
        8,
        peer=Link(1000.0),
        peer_uses_host=False,
    )
    assert pipedream(fast).bounds == (0, 2, 4)
    slow = Problem(
        Costs(layers, edges),
        2,
        find_schedule("pipedream"),
        8,
        peer=Link(25.0),
        peer_uses_host=False,
    )
    assert pipedream(slow).bounds in {(0, 1, 4), (0, 3, 4)}
