"""Splits that others made of graph files."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.planners.expert_split import expert_split, split_loads_s
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.pipedream_cuts import pipedream
from jvpipe.planners.model.problem import Problem
from jvpipe.profiles.graph_file import read_graph
from jvpipe.profiles.graph_parts import GraphFile
from jvpipe.schedules import find_schedule
from tests.real_profiles import profile


def test_an_output_is_sent_once_and_comes_once_to_each_device_that_reads_it() -> None:
    layers = tuple(
        LayerCost("layer", seconds, 0.0, (Option(0),)) for seconds in (1.0, 2.0, 4.0, 8.0)
    )
    edges = (Edge(0, (1, 2, 3), 100, differentiable=False), Edge(2, (3,), 1000))
    graph = GraphFile(Costs(layers, edges, ids=(4, 5, 6, 7)), link=Link(1000.0))
    assert split_loads_s(graph, [[4], [5, 99], [7, 6]]) == pytest.approx((1.1, 2.1, 12.1))
    assert split_loads_s(graph, [[4, 5], [6], [7]]) == pytest.approx((3.1, 4.1 + 2.0, 8.1 + 2.0))


def test_a_layer_without_a_device_is_named() -> None:
    graph = GraphFile(Costs((LayerCost("a", 1.0, 1.0, (Option(0),)),), ids=(4,)))
    with pytest.raises(ValueError, match=r"the split leaves out nodes \[4\]"):
        split_loads_s(graph, [[5]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cpus": []}', "line 1: the field fpgas is missing"),
        ('{"fpgas": [\n{"load": 1}]}', "line 2: the field nodes is missing"),
        (
            '{"fpgas": [\n{"nodes": ["7"]}]}',
            "line 2: the field nodes holds '7', which is not the id of a node",
        ),
        (
            '{"fpgas": [\n{"nodes": [7]}, {"nodes": [8, 7]}]}',
            "line 1: the field nodes holds 7 twice",
        ),
        ('{"cpus": [{"nodes": [1]}], "fpgas": []}', "line 1: the field cpus holds nodes"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_field(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        expert_split(path)


def test_the_experts_split_of_bert() -> None:
    graph = read_graph(profile("dnn_partitioning_bert24_training.json"))
    raw = json.loads(profile("dnn_partitioning_bert24_training.json").read_text())
    split = expert_split(profile("dnn_partitioning_bert24_training_expert.json"))
    assert sorted(n for nodes in split for n in nodes) == sorted(n["id"] for n in raw["nodes"])
    latency = {n["id"]: n["fpgaLatency"] for n in raw["nodes"]}
    for nodes, load_s in zip(split, split_loads_s(graph, split), strict=True):
        work_s = sum(latency[n] for n in nodes) / 1e3
        outside = [e for e in raw["edges"] if (e["sourceId"] in nodes) != (e["destId"] in nodes)]
        paid = {(e["sourceId"], e["sourceId"] in nodes): e["cost"] / 1e3 for e in outside}
        assert load_s == pytest.approx(work_s + sum(paid.values()), rel=1e-9)


def test_planned_cuts_are_no_worse_than_the_experts() -> None:
    graph = read_graph(profile("dnn_partitioning_bert24_training.json"))
    split = expert_split(profile("dnn_partitioning_bert24_training_expert.json"))
    limit = graph.memory_limit_bytes
    assert limit is not None
    assert graph.devices == len(split)
    problem = Problem(
        graph.costs,
        len(split),
        find_schedule("1f1b"),
        6,
        limit,
        peer=graph.link,
        peer_uses_host=False,
    )
    planned = [graph.costs.ids[i:j] for i, j in pairwise(pipedream(problem).bounds)]
    assert max(split_loads_s(graph, planned)) < max(split_loads_s(graph, split))
    held = {
        n: x.parameter_bytes + x.gradient_bytes
        for n, x in zip(graph.costs.ids, graph.costs.layers, strict=True)
    }
    assert all(sum(held[n] for n in nodes) <= limit for nodes in planned)
