"""Simulated steps of replicated stages."""

import random
from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.model import replicas_step
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import ReplicaStage, period_s
from jvpipe.planners.model.replicas_step import simulated_s
from tests.planners.joint.replicas import GPU, chain, flat, layer

TWO = ReplicaProblem(chain([layer(1.0), layer(1.0)], [8]), flat(4, 1.0), 4, 16)
PLAN = ReplicaPlan((0, 1, 2), ((0, 1, 2), (3,)), 4)


def test_one_stage_is_its_work_and_its_all_reduce() -> None:
    plan = ReplicaPlan((0, 2), ((0, 1),), 4)
    assert simulated_s(TWO, plan, (ReplicaStage(1.0, 2.0, 0.0, 5.0, 0),)) == 4 * 3 + 5


def test_the_all_reduce_of_a_later_stage_hides_behind_the_backwards_before_it() -> None:
    def step_s(first: int, last: int) -> float:
        stages = (
            ReplicaStage(1.0, 2.0, 0.0, float(first), 0),
            ReplicaStage(1.0, 2.0, 0.0, float(last), 0),
        )
        return simulated_s(TWO, PLAN, stages)

    assert step_s(0, 0) == 15
    assert step_s(0, 2) == 15
    assert step_s(0, 5) == 15 + 3
    assert step_s(4, 5) == 15 + 4


def test_stages_that_share_a_network_reduce_one_after_the_other() -> None:
    cluster = Cluster("two", GPU, 2, 2, peer=Link(1e9), network=Link(1.0))
    problem = ReplicaProblem(TWO.costs, cluster, 4, 16)
    stages = (ReplicaStage(1.0, 2.0, 0.0, 10.0, 0),) * 2
    across, apart = (
        ReplicaPlan((0, 1, 2), places, 4) for places in (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    )
    assert simulated_s(problem, apart, stages) == 15 + 10
    assert simulated_s(problem, across, stages) == 13 + 20  # the last stage's begins 2 s before


def test_many_micro_batches_go_on_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ReplicaProblem(TWO.costs, flat(4, 1.0), 4, 4 * 60)
    stages = (ReplicaStage(1.0, 2.0, 0.0, 4.0, 0), ReplicaStage(1.5, 2.5, 3.0, 4.0, 0))
    short = simulated_s(problem, PLAN, stages)
    monkeypatch.setattr(replicas_step, "LEAST_SIMULATED", 100)
    assert short == pytest.approx(simulated_s(problem, PLAN, stages))


def test_in_the_long_run_micro_batches_are_a_period_apart_or_more_where_stages_wait_for_networks() -> (
    None
):
    draw = random.Random(7)
    shared = Cluster("two", GPU, 2, 2, peer=Link(1e9), network=Link(1.0))
    places = ((0,), (2,), (1,), (3,))  # each next one on the other machine
    for _ in range(6):
        seconds = [
            (draw.uniform(0.5, 2.0), draw.uniform(1.0, 4.0), draw.choice((0.5, 4.0)))
            for _ in range(4)
        ]
        stages = tuple(
            ReplicaStage(f, b, c if s else 0.0, 0.0, 0) for s, (f, b, c) in enumerate(seconds)
        )
        for cluster, waits in ((flat(4, 1.0), False), (shared, True)):
            problem = ReplicaProblem(TWO.costs, cluster, 4, 400)
            plan = ReplicaPlan((0, 1, 2, 3, 4), places, 1)
            steps_s = [
                simulated_s(replace(problem, batch=count), plan, stages, closely=True)
                for count in (120, 240)
            ]
            apart_s = (steps_s[1] - steps_s[0]) / 120
            assert apart_s >= period_s(stages) * (1 - 1e-6)
            assert waits or apart_s <= 1.15 * period_s(stages)
