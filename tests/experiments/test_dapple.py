"""DAPPLE's table V, where the profiles are."""

from dataclasses import replace

import pytest

from experiments.dapple import run, speed
from experiments.dapple.deepest import deepened
from experiments.dapple.run import beside_gpipe, problem_of, short
from experiments.planners.tables import PROFILES
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.planners.joint.replicas_planner import plan_replicas
from jvpipe.planners.model.replicas_costs import LocalCosts
from jvpipe.planners.model.replicas_plan import ReplicaPlan


def test_plans_in_cells() -> None:
    assert short(ReplicaPlan((0, 3), ((0, 1),), 2)) == "DP on 2"
    assert short(ReplicaPlan((0, 2, 3), ((0, 1), (2,)), 2)) == "2:1 (2:1; mu 2)"
    assert short(ReplicaPlan((0, 2, 3), ((0,), (2,)), 2)) == "straight (2:1; mu 2)"


@pytest.mark.skipif(not PROFILES.is_dir(), reason="the profiles are not there")
def test_vgg_leaves_its_dense_layers_alone_on_slow_links_as_in_the_paper() -> None:
    assert plan_replicas(problem_of("vgg16", 2048, "B", overlaps=True)).best.plan.replicas == (16,)
    assert plan_replicas(problem_of("vgg16", 2048, "C")).best.plan.replicas == (15, 1)


def test_a_row_for_each_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speed,
        "costs_of",
        lambda _: LocalCosts((1,), (Costs((LayerCost("l", 1.0, 2.0, (Option(1),)),)),)),
    )
    told = list(speed.rows([16, 24], [("one", 1)]))[2:]
    assert [line.split(" | ")[1:3] for line in told] == [
        ["one (16)", "DP on 16"],
        ["one (24)", "DP on 24"],
    ]


def test_gpipe_holds_more_of_more_micro_batches_and_1f1b_does_not() -> None:
    rows = [line.strip("| ").split(" | ") for line in list(beside_gpipe(size="tiny"))[2:]]
    assert [row[:2] for row in rows] == [
        [order, count] for order in ("gpipe", "1f1b") for count in ("2", "8", "16")
    ]
    shares = [float(row[-1]) for row in rows]
    assert 1 == shares[0] < shares[1] < shares[2]
    assert shares[0] >= shares[3] == shares[4] == shares[5]


def test_more_in_flight_hides_transfers_and_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(LayerCost("l", 0.01, 0.02, (Option(10**6),)) for _ in range(20))
    costs = Costs(layers, tuple(Edge(i, (i + 1,), 10**7) for i in range(19)))
    monkeypatch.setattr(run, "costs_of", lambda _: LocalCosts((1,), (costs,)))
    a, b = (line.strip("| ").split(" | ") for line in list(run.policies((("one", 64, 1),)))[2:])
    assert (a[1:3], b[1:3]) == (["A", "16"], ["B", "31"])
    assert float(a[3]) > float(b[3])
    assert float(a[4]) < float(b[4])


def test_other_planners_are_told_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LayerCost("l", 1.0, 2.0, (Option(1),), parameter_bytes=10)
    monkeypatch.setattr(run, "costs_of", lambda _: LocalCosts((1,), (Costs((alone,) * 16),)))
    problem = problem_of("one", 16, "B")
    best = run.ask_replicas("dapple", problem).best
    assert run.other_s("dapple", problem, best) == "1.00"
    assert float(run.other_s("pipedream", problem, best)) >= 1
    assert run.other_s("pipedream", replace(problem, memory_limit_bytes=1), best) == "does not fit"


def chain(blocks: int) -> Costs:
    """Embeddings, blocks of two layers, a head that has the embeddings' table too."""
    sizes = (7, *[5, 9] * blocks, 3)
    last = len(sizes) - 1
    layers = tuple(
        LayerCost("layer", 1.0, 2.0, (Option(size),), parameter_bytes=size) for size in sizes
    )
    edges = tuple(Edge(i, (i + 1,), sizes[i]) for i in range(last))
    tied = tuple(Shared((1 + 2 * b, 2 + 2 * b), 4, per_version=True) for b in range(blocks))
    return Costs(layers, edges, (*tied, Shared((0, last), 7, per_version=True)))


def test_a_deeper_model_is_the_model_with_more_blocks() -> None:
    found, true = deepened(chain(3), 2), chain(5)
    assert found.layers == true.layers
    assert set(found.edges) == set(true.edges)
    assert set(found.shared) == set(true.shared)
    assert (len(found.edges), len(found.shared)) == (len(true.edges), len(true.shared))
