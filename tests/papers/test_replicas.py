"""Planners of replicated stages, asked by name."""

import pytest

from jvpipe.papers.replicas import REPLICA_PLANNERS, ask_replicas
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from tests.planners.joint.replicas import best_s, chain, flat, layer

COSTS = chain([layer(s, p, 10) for s, p in ((1.0, 5), (2.0, 60), (1.0, 0), (0.5, 300))], [4, 8, 2])


@pytest.mark.parametrize("planner", REPLICA_PLANNERS)
def test_answers_are_the_best_of_their_sizes_and_no_better_than_everything_there_is(
    planner: str,
) -> None:
    problem = ReplicaProblem(COSTS, flat(4, 50.0), 4, 8)
    answer = ask_replicas(planner, problem)
    assert answer.planner == planner
    assert answer.bound_s <= best_s(problem) <= answer.best.step_s * (1 + 1e-9)
    assert answer.best.step_s == min(each.step_s for each in answer.shapes.values())


@pytest.mark.parametrize("planner", REPLICA_PLANNERS)
def test_the_limit_that_is_named_would_do(planner: str) -> None:
    problem = ReplicaProblem(COSTS, flat(4, 50.0), 4, 8, 500)
    with pytest.raises(Infeasible) as refused:
        ask_replicas(planner, problem)
    enough = refused.value.smallest_limit_bytes
    best = ask_replicas(planner, ReplicaProblem(COSTS, flat(4, 50.0), 4, 8, enough)).best
    assert 500 < max(stage.peak_bytes for stage in best.stages) <= enough


def test_mistakes() -> None:
    with pytest.raises(
        ValueError, match="planner 'pipedream' decides stages, replicas and cuts itself"
    ):
        ask_replicas("pipedream", ReplicaProblem(COSTS, flat(4, 50.0), 4, 8, pins=Pins(stages=2)))
    with pytest.raises(
        ValueError,
        match=r"5 devices: pipedream replicates .* the model has 4 pieces: use at most 4",
    ):
        ask_replicas("pipedream", ReplicaProblem(COSTS, flat(8, 50.0), 5, 8))
