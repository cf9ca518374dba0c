"""Graphs of operators as the format's authors write them: colors whose members lie far apart,
backward operators that have no forward, and what the format says that a split costs.
"""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.planners.expert_split import split_loads_s
from jvpipe.cli.plan_command import main
from jvpipe.profiles.graph_file import read_graph

Raw = dict[str, Any]


def operator_graph(blocks: int, seed: int = 0) -> Raw:
    """A model in training: each block is a product, its weight (an operator that is numbered before
    all others), a norm, and a sum with the block's input; the gradients of that input are summed by
    an operator of no color. The loss is a backward operator, as exporters write it, of a color of
    its own. A gradient is as large as its value.
    """
    rng = random.Random(seed)
    nodes: list[Raw] = []
    edges: list[Raw] = []
    costs = [rng.choice([0.25, 1.0, 1.5]) for _ in range(blocks + 1)]
    cost_of: dict[int, float] = {}

    def operator(backward: bool, color: int | None, cost: float, *reads: int) -> int:
        name, size = len(nodes), rng.choice([0.0, 4096.0, 1e6])
        node = {
            "id": name,
            "fpgaLatency": rng.uniform(0, 3),
            "size": size,
            "isBackwardNode": int(backward),
        }
        nodes.append(
            node | {"supportedOnFpga": 1} | ({} if color is None else {"colorClass": color})
        )
        cost_of[name] = cost
        edges.extend(
            {"sourceId": source, "destId": name, "cost": cost_of[source]} for source in reads
        )
        return name

    weights = [operator(False, 3 * b, 9.0) for b in range(blocks)]
    x = operator(False, 3 * blocks, costs[-1])
    for b, cost in enumerate(costs[:-1]):
        product = operator(False, 3 * b, cost, x, weights[b])
        norm = operator(False, 3 * b + 1, cost, product)
        x = operator(False, 3 * b + 2, cost, norm, x)
    loss = operator(True, 3 * blocks + 1, 0.0, x)
    dx = operator(True, 3 * blocks + 1, costs[-2], loss)
    for b, cost in reversed(list(enumerate(costs[:-1]))):
        aside, back = operator(True, 3 * b + 2, cost, dx), operator(True, 3 * b + 2, cost, dx)
        dnorm = operator(True, 3 * b + 1, cost, back)
        dproduct = operator(True, 3 * b, cost, dnorm)
        dx = operator(True, None, cost, dproduct, aside)
    operator(True, 3 * blocks, 0.0, dx)
    return {"maxSizePerFPGA": 1e9, "maxFPGAs": 3, "maxCPUs": 0, "nodes": nodes, "edges": edges}


def loads_ms(raw: Raw, split: Sequence[Sequence[int]]) -> list[float]:
    """What the format says that each device is loaded with: its nodes, and what it sends and what
    comes, each once.
    """
    color = {n["id"]: n.get("colorClass", -1 - n["id"]) for n in raw["nodes"]}
    device_of_color = {color[node]: d for d, nodes in enumerate(split) for node in nodes}
    device = {node: device_of_color[color[node]] for node in color}
    loads = [0.0] * len(split)
    for node in raw["nodes"]:
        loads[device[node["id"]]] += node["fpgaLatency"]
    away: dict[int, set[int]] = defaultdict(set)
    cost = {}
    for edge in raw["edges"]:
        away[edge["sourceId"]].add(device[edge["destId"]])
        cost[edge["sourceId"]] = edge["cost"]
    for source, targets in away.items():
        others = targets - {device[source]}
        for d in (device[source], *others) if others else ():
            loads[d] += cost[source]
    return loads


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Path, Raw]:
    raw, path = operator_graph(20), tmp_path / "operators.json"
    path.write_text(json.dumps(raw))
    return path, raw


def lawful_cuts(path: Path) -> list[int]:
    """Where the layers may be cut."""
    costs = read_graph(path).costs
    inside = {b for group in costs.together for b in range(min(group) + 1, max(group) + 1)}
    return [b for b in range(1, len(costs.layers)) if b not in inside]


def test_colors_whose_members_lie_far_apart_leave_as_many_pieces_as_there_are_colors(
    graph: tuple[Path, Raw],
) -> None:
    path, raw = graph
    colors = {node.get("colorClass", -1 - node["id"]) for node in raw["nodes"]}
    assert len(colors) == 62 + 20, "three of each block, the input, the loss; a sum of each block"
    assert len(lawful_cuts(path)) + 1 == len(colors)


def test_a_graph_of_forward_operators_alone_is_cut_as_often(tmp_path: Path) -> None:
    raw, path = operator_graph(20), tmp_path / "inference.json"
    raw["nodes"] = [node for node in raw["nodes"] if not node["isBackwardNode"]]
    forward = {node["id"] for node in raw["nodes"]}
    raw["edges"] = [edge for edge in raw["edges"] if edge["destId"] in forward]
    path.write_text(json.dumps(raw))
    assert len(lawful_cuts(path)) + 1 == len({node["colorClass"] for node in raw["nodes"]}) == 61


def test_backward_operators_without_a_forward_are_layers_that_the_forward_passes(
    graph: tuple[Path, Raw],
) -> None:
    path, raw = graph
    costs = read_graph(path).costs
    forward = {node.get("colorClass") for node in raw["nodes"] if not node["isBackwardNode"]}
    orphans = [
        node["id"]
        for node in raw["nodes"]
        if node["isBackwardNode"] and node.get("colorClass") not in forward
    ]
    place = {node: i for i, node in enumerate(costs.ids)}
    there = [node for node in orphans if node in place]
    assert len(there) == 21  # the loss and its gradient are of one color
    assert all(costs.layers[place[node]].forward_s == 0 for node in there)
    assert place[there[0]] == len(costs.ids) - 1, "the loss reads what the last layer makes"
    total_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
    assert total_s == pytest.approx(sum(node["fpgaLatency"] for node in raw["nodes"]) / 1e3)
    held = sum(layer.parameter_bytes + layer.gradient_bytes for layer in costs.layers)
    assert held == sum(node["size"] for node in raw["nodes"])


def test_every_lawful_split_costs_what_the_format_says(graph: tuple[Path, Raw]) -> None:
    path, raw = graph
    file, cuts, rng = read_graph(path), lawful_cuts(path), random.Random(1)
    for count in (1, 2, 5, 20, len(cuts)):
        bounds = [0, *sorted(rng.sample(cuts, count)), len(file.costs.layers)]
        split = [file.costs.ids[i:j] for i, j in pairwise(bounds)]
        assert [1e3 * load for load in split_loads_s(file, split)] == pytest.approx(
            loads_ms(raw, split)
        )


def test_a_cycle_through_colors_is_one_piece(tmp_path: Path) -> None:
    raw = operator_graph(4)
    first, last = raw["nodes"][5], raw["nodes"][13]  # of the first block, of the third
    assert first["colorClass"] != last["colorClass"]
    last["colorClass"] = first["colorClass"]
    path = tmp_path / "operators.json"
    path.write_text(json.dumps(raw))
    (group,) = read_graph(path).costs.together[:1]
    ids = read_graph(path).costs.ids
    assert {5, 6, 7, 8, 9, 10, 11, 12, 13} <= {ids[layer] for layer in group}


def test_backward_edges_that_run_the_way_of_the_forward_mirror_it_all_the_same(
    tmp_path: Path,
) -> None:
    one = {"fpgaLatency": 1.0, "size": 8.0}
    nodes = [one | {"id": n, "isBackwardNode": n // 3, "colorClass": n % 3} for n in range(6)]
    edges = [{"sourceId": a, "destId": a + 1, "cost": 2.0, "size": 64.0} for a in (0, 1, 3, 4)]
    path = tmp_path / "layers.json"
    path.write_text(
        json.dumps({"maxSizePerFPGA": 1e9, "maxFPGAs": 3, "nodes": nodes, "edges": edges})
    )
    costs = read_graph(path).costs
    assert (costs.together, costs.ids) == ((), (0, 1, 2))
    assert [(e.producer, e.readers, e.differentiable) for e in costs.edges] == [
        (0, (1,), True),
        (1, (2,), True),
    ]


@pytest.mark.parametrize("planner", ["even", "pipedream", "jvpipe"])
def test_a_large_graph_of_operators_is_planned(planner: str, tmp_path: Path) -> None:
    raw, path, out = operator_graph(100), tmp_path / "operators.json", tmp_path / "plan.json"
    path.write_text(json.dumps(raw))
    options = [
        "--graph",
        str(path),
        "--stages",
        "6",
        "--schedule",
        "pipedream",
        "--planner",
        planner,
    ]
    assert main([*options, "--json", str(out)]) == 0
    device = {
        node: s for s, x in enumerate(json.loads(out.read_text())["stages"]) for node in x["layers"]
    }
    color = {node["id"]: node.get("colorClass", -1 - node["id"]) for node in raw["nodes"]}
    assert len({(color[node], s) for node, s in device.items()}) == len(set(color.values()))
