"""Cuts for given devices, beside all that there are."""

import random
from itertools import combinations

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.replicas_cuts import recut
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem, check
from jvpipe.planners.model.replicas_stage import Tables, surrogate_s
from tests.planners.joint.replicas import GPU, chain, layer

CLUSTER = Cluster("two", GPU, 4, 2, peer=Link(100.0), network=Link(30.0))
PLACES = ((0,), (1, 2, 3), (4, 5))


@pytest.mark.parametrize("limit", [None, 900])
def test_the_first_has_the_least_bottleneck_of_all_cuts_and_the_best_is_near_the_least_step(
    limit: int | None,
) -> None:
    draw = random.Random(6)
    for _ in range(4):
        layers = [
            layer(draw.uniform(0.5, 2.0), draw.randint(0, 60), draw.randint(1, 9)) for _ in range(9)
        ]
        problem = ReplicaProblem(
            chain(layers, [draw.randint(1, 9) for _ in layers[1:]]), CLUSTER, 8, 24, limit
        )
        tables = Tables(problem)
        every = [ReplicaPlan((0, *inner, 9), PLACES, 12) for inner in combinations(range(1, 9), 2)]
        counted = [stages for plan in every if tables.fits(stages := tables.stages(plan))]
        found = list(recut(tables, every[0]))
        for plan in found:
            check(problem, plan)
            assert tables.fits(tables.stages(plan))
            assert (plan.places, plan.size) == (PLACES, 12)
        mine = [tables.stages(plan) for plan in found]
        slowest = [max(stage.seconds for stage in stages) for stages in (mine[0], *counted)]
        assert slowest[0] == pytest.approx(min(slowest[1:]))
        assert min(surrogate_s(stages, 2) for stages in mine) <= 1.02 * min(
            surrogate_s(x, 2) for x in counted
        )


def test_all_cuts_are_looked_at_where_grids_have_few_of_them() -> None:
    layers = [layer(1.0)] * 96
    problem = ReplicaProblem(chain(layers, [1] * 95), Cluster("fast", GPU, 4, peer=Link(1e9)), 4, 8)
    tables = Tables(problem)
    assert len(tables.coarse) < 40
    uneven = ReplicaPlan((0, 1, 2, 3, 96), ((0,), (1,), (2,), (3,)), 1)
    assert next(iter(recut(tables, uneven))).bounds == (0, 24, 48, 72, 96)


def test_no_cuts_where_none_fit_or_there_is_nothing_to_cut() -> None:
    problem = ReplicaProblem(chain([layer(1.0, 100)] * 4, [1] * 3), CLUSTER, 8, 24, 50)
    assert list(recut(Tables(problem), ReplicaPlan((0, 1, 2, 4), PLACES, 12))) == []
    assert list(recut(Tables(problem), ReplicaPlan((0, 4), (PLACES[1],), 12))) == []
