"""Data and pipeline parallelism planned together."""

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.papers.dapple import dapple
from jvpipe.papers.pipedream import pipedream
from jvpipe.papers.replica_rules import RULES, as_replicas, one_each
from jvpipe.planners.joint.replicas_planner import plan_replicas
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s
from tests.planners.joint.replicas import GPU, best_s, chain, every_plan, flat, layer


def test_uniform_layers_on_fast_links_are_data_parallel() -> None:
    problem = ReplicaProblem(chain([layer(1.0, 1000)] * 12, [1000] * 11), flat(8, 1e9), 8, 64)
    answer = plan_replicas(problem)
    assert answer.best.plan.shape == "data parallel"
    assert answer.best.plan.replicas == (8,)
    assert answer.gap < 0.01


def test_large_parameters_at_the_end_and_slow_links_leave_the_last_layers_alone() -> None:
    # VGG-19 in short: convolutions that compute, with few parameters and falling activations; 400 MB of dense layers
    convolutions = [layer(0.0001, 4_000_000) for _ in range(16)]
    sizes = [*(12_000_000 >> (i // 3) for i in range(15)), 100_000]
    dense = [layer(0.00001, 400_000_000), layer(0.00001, 64_000_000), layer(0.00001, 16_000_000)]
    costs = chain([*convolutions, *dense], [*sizes, 16_000, 16_000])
    answer = plan_replicas(ReplicaProblem(costs, flat(16, 1.25e9 * 0.8), 16, 2048))
    assert answer.best.plan.replicas == (15, 1)
    assert answer.best.plan.bounds[1] == 16
    assert answer.shapes["data parallel"].step_s > answer.best.step_s


def test_small_cases_are_as_good_as_anything_there_is() -> None:
    draw = random.Random(1)
    clusters = (
        flat(4, 20.0),
        flat(3, 200.0),
        Cluster("two", GPU, 2, 2, peer=Link(200.0), network=Link(20.0)),
    )
    for _ in range(12):
        layers = [
            layer(draw.uniform(0.5, 2.0), draw.randint(0, 60), draw.randint(1, 9)) for _ in range(4)
        ]
        cluster = draw.choice(clusters)
        limit = draw.choice((None, 400))
        costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
        problem = ReplicaProblem(costs, cluster, cluster.devices, draw.choice((6, 8)), limit)
        answer = plan_replicas(problem)
        assert answer.best.step_s == pytest.approx(best_s(problem))
        assert answer.bound_s <= answer.best.step_s


def papers_plans(tables: Tables, size: int) -> Iterator[ReplicaPlan]:
    """Yields the papers' plans, with replicas and, of few stages, with one device each."""
    asked = one_each(tables, size, min(tables.problem.devices, len(tables.cuts) - 1), tables.cuts)
    for decide in (pipedream, dapple):
        with suppress(Infeasible):
            yield as_replicas(tables, decide(asked), size)
    for rule in RULES.values():
        with suppress(ValueError):
            plan = rule(tables, size)
            if plan is not None:
                yield plan


def test_no_plan_is_slower_than_plain_data_parallelism_straight_pipelines_and_the_papers_plans() -> (
    None
):
    draw = random.Random(2)
    for _ in range(3):
        layers = [layer(draw.uniform(0.5, 2.0), draw.randint(0, 60)) for _ in range(10)]
        cluster = Cluster("two", GPU, 4, 2, peer=Link(100.0), network=Link(30.0))
        problem = ReplicaProblem(
            chain(layers, [draw.randint(1, 9) for _ in layers[1:]]), cluster, 8, 16
        )
        best, tables = plan_replicas(problem).best, Tables(problem)
        straight = (
            ReplicaPlan((0, *range(3, 10), 10), tuple((d,) for d in range(8)), size)
            for size in (1, 2, 4)
        )
        plain = (ReplicaPlan((0, 10), (tuple(range(8)),), size) for size in (16, 8))
        papers = (plan for size in problem.sizes for plan in papers_plans(tables, size))
        for plan in (*straight, *plain, *papers):
            assert best.step_s <= simulated_s(problem, plan, tables.stages(plan)) * (1 + 1e-9)


def test_the_best_of_other_shapes_are_near_the_best_there_are() -> None:
    layers = [layer(s, p) for s, p in ((1.0, 5), (2.0, 60), (1.0, 0), (0.5, 300))]
    problem = ReplicaProblem(chain(layers, [4, 8, 2]), flat(4, 50.0), 4, 8)
    found, tables, best = plan_replicas(problem).shapes, Tables(problem), dict[str, float]()
    for plan in every_plan(problem):
        step_s = simulated_s(problem, plan, tables.stages(plan))
        best[plan.shape] = min(step_s, best.get(plan.shape, step_s))
    assert found.keys() == best.keys()
    assert all(found[shape].step_s <= 1.05 * best[shape] for shape in best)


def test_layers_run_again_where_nothing_fits_otherwise_and_else_the_bytes_are_named() -> None:
    costs = chain([layer(1.0, 10, 100)] * 4, [1] * 3)
    free = plan_replicas(ReplicaProblem(costs, flat(2, 100.0), 2, 4, 1_000)).best.stages
    tight = plan_replicas(ReplicaProblem(costs, flat(2, 100.0), 2, 4, 250)).best.stages
    assert sum(x.backward_s / x.forward_s for x in free) / len(free) == 2
    assert sum(x.backward_s / x.forward_s for x in tight) / len(tight) == 3
    with pytest.raises(Infeasible, match="even with every layer run again") as caught:
        plan_replicas(ReplicaProblem(costs, flat(2, 100.0), 2, 4, 20))
    enough = caught.value.smallest_limit_bytes
    plan_replicas(ReplicaProblem(costs, flat(2, 100.0), 2, 4, enough))
    assert enough > 20
