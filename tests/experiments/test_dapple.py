"""DAPPLE's table V, where the profiles are."""

from dataclasses import replace

import pytest

from experiments.dapple import run, speed
from experiments.dapple.deepest import deepened
from experiments.dapple.run import beside_gpipe, shapes_of, short
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.hardware import Accelerator, Cluster
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.papers.asking import ask_shapes
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.shapes import Shape


def test_a_plan_is_written_as_in_a_cell_of_the_paper() -> None:
    costs = Costs((LayerCost("l", 1.0, 2.0, (Option(1),)),) * 3)
    cluster = Cluster("lab", Accelerator("small", 10**9, 1e9, {}), 3)
    shapes = run.shapes_on(LocalCosts((1,), (costs,)), cluster, 3, 4)
    for places, bounds, told in (
        (((0, 1),), (0, 3), "DP on 2"),
        (((0, 1), (2,)), (0, 2, 3), "2:1 (2:1; mu 2)"),
        (((0,), (2,)), (0, 2, 3), "straight (2:1; mu 2)"),
    ):
        problem = shapes.problem(Shape(places, 2))
        assert short(shapes, problem, Decision.keeping_all(bounds)) == told


@pytest.mark.thorough
def test_vgg_leaves_its_dense_layers_alone_on_slow_links_as_in_the_paper() -> None:
    alone = ask_shapes("jvpipe", shapes_of("vgg16", 2048, "B", overlaps=True))
    assert alone.plan.replicas == (16,)
    assert ask_shapes("jvpipe", shapes_of("vgg16", 2048, "C")).plan.replicas == (15, 1)


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
    rows = [
        line.strip("| ").split(" | ")
        for line in list(beside_gpipe(replace(run.TRACED["bert-48"], size="tiny")))[2:]
    ]
    assert [row[:2] for row in rows] == [
        [order, count] for order in ("gpipe", "1f1b") for count in ("2", "8", "16")
    ]
    shares = [float(row[-1]) for row in rows]
    assert 1 == shares[0] < shares[1] < shares[2]
    assert shares[0] >= max(shares[3:]) <= min(shares[3:]) + 0.01  # plans may differ a little


def test_more_in_flight_hides_transfers_and_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(LayerCost("l", 0.01, 0.02, (Option(10**6),)) for _ in range(20))
    costs = Costs(layers, tuple(Edge(i, (i + 1,), 10**7) for i in range(19)))
    monkeypatch.setattr(run, "costs_of", lambda _: LocalCosts((1,), (costs,)))
    a, b = (line.strip("| ").split(" | ") for line in list(run.policies((("one", 64, 1),)))[2:])
    assert (a[1:3], b[1:3]) == (["A", "16"], ["B", "31"])
    assert float(a[3]) > float(b[3])
    assert float(a[4]) < float(b[4])


def test_pipedream_wants_a_layer_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Costs((LayerCost("l", 1.0, 2.0, (Option(1),)),) * 4)
    monkeypatch.setattr(run, "costs_of", lambda _: LocalCosts((1,), (few,)))
    shapes = shapes_of("one", 16, "B")
    assert run.other_s("pipedream", shapes, 1.0) == "too few layers"
    rows = [line.strip("| ").split(" | ") for line in list(run.table_vii([("one", 32)]))[2:]]
    assert [row[1] for row in rows] == ["2 x 8", "4 x 8"]
    assert all("too few layers" in row[4] for row in rows)


@pytest.mark.thorough
def test_other_planners_are_told_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LayerCost("l", 1.0, 2.0, (Option(1),), parameter_bytes=10)
    monkeypatch.setattr(run, "costs_of", lambda _: LocalCosts((1,), (Costs((alone,) * 16),)))
    shapes = shapes_of("one", 16, "B")
    best_s = ask_shapes("dapple", shapes).step_s
    assert run.other_s("dapple", shapes, best_s) == "1.00"
    assert float(run.other_s("pipedream", shapes, best_s)) >= 1
    assert run.other_s("pipedream", shapes.under(1), best_s) == "does not fit"


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
