"""The JSON files of dnn-partitioning: what is read, and what is wrong with bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.profiles.graph_file import read_graph
from jvpipe.profiles.graph_json import read_graph_json
from jvpipe.profiles.graph_parts import GraphFile
from jvpipe.profiles.located_json import parse_located
from tests.real_profiles import profile


def node(
    number: int, color: int | None = None, backward: bool = False, **fields: Any
) -> dict[str, Any]:
    found = {
        "id": number,
        "fpgaLatency": 1.0,
        "cpuLatency": 9.0,
        "size": 8.0,
        "isBackwardNode": int(backward),
    }
    return found | ({} if color is None else {"colorClass": color}) | fields


def edge(source: int, target: int, **fields: Any) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": 0.0} | fields


def read(nodes: list, edges: list | None = None, **fields: Any) -> GraphFile:
    whole = {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "nodes": nodes, "edges": edges or []} | fields
    return read_graph_json(json.dumps(whole, indent=1), "g.json")


def test_objects_within_objects_keep_the_lines_where_they_open() -> None:
    text = '{"a": [{"b": {"x": 1}},\n {"c": "}{"}],\n "d":\n {"e": 2}}'
    whole = parse_located(text, "g.json")
    first, second = whole["a"]
    lines = [one.line for one in (whole, first, second, first["b"], whole["d"])]
    assert lines == [1, 1, 2, 1, 4]


def test_a_forward_node_and_its_backward_are_one_layer() -> None:
    nodes = [
        node(5, 1, fpgaLatency=2.0, size=30.0, name="block"),
        node(2, 1, backward=True, fpgaLatency=4.0, size=20.0),
        node(6, 2),
    ]
    found = read(nodes, [edge(5, 6, cost=2.0, size=1000.0)])
    layer, other = found.costs.layers
    assert (layer.name, layer.forward_s, layer.backward_s) == ("block", 0.002, 0.004)
    assert (layer.parameter_bytes, layer.gradient_bytes, len(layer.options)) == (30, 20, 1)
    assert (other.name, other.backward_s, other.gradient_bytes) == ("node6", 0.0, 0)
    assert (found.costs.ids, found.costs.together) == ((5, 6), ())
    assert (found.memory_limit_bytes, found.devices) == (100, 2)


def test_edges_take_their_cost_over_the_files_link() -> None:
    edges = [
        edge(1, 2, cost=2.0, size=1000.0),
        edge(1, 3, cost=2.0, size=1000.0),
        edge(2, 3, cost=5.0, size=2500.0),
    ]
    grads = [node(9, 1, backward=True), node(8, 2, backward=True)]
    found = read([node(1, 1), node(2, 2), node(3, 3), *grads], [*edges, edge(8, 9)])
    assert found.link.bytes_per_s == pytest.approx(500_000.0)
    first, second = found.costs.edges
    assert (first.producer, first.readers, first.differentiable) == (0, (1, 2), True)
    assert (second.producer, second.readers, second.differentiable) == (1, (2,), False)
    assert found.link.seconds(first.bytes) == pytest.approx(0.002)
    assert found.link.seconds(second.bytes) == pytest.approx(0.005)


def test_a_class_of_several_forward_nodes_stays_together() -> None:
    nodes = [
        node(1, 7),
        node(2, 3),
        node(3, 7),
        node(4),
        node(5),
        node(8, 7, backward=True, fpgaLatency=6.0),
    ]
    found = read([*nodes, node(9, 7, backward=True, fpgaLatency=1.0)], [edge(1, 2), edge(2, 3)])
    assert found.costs.together == ((0, 1, 2),)  # node 2 stands between nodes 1 and 3
    assert [layer.backward_s for layer in found.costs.layers] == pytest.approx(
        [0.0, 0.0, 0.007, 0.0, 0.0]
    )


def test_backward_nodes_change_nothing_about_the_order() -> None:
    nodes = [
        node(3, 3),
        node(1, 1),
        node(2, 2),
        node(4, 3, backward=True),
        node(5, 1, backward=True),
    ]
    found = read(nodes, [edge(3, 1), edge(1, 5), edge(4, 5), edge(3, 4)])
    assert found.costs.ids == (2, 3, 1)
    assert [(e.producer, e.readers) for e in found.costs.edges] == [(1, (2,))]


@pytest.mark.parametrize(
    ("nodes", "edges", "fields", "message"),
    [
        (
            [node(1), node(2)],
            [edge(1, 2), edge(2, 1)],
            {},
            r"g.json, line \d+: the edges of nodes .* run in a cycle",
        ),
        ([node(1)], [edge(1, 1)], {}, "nodes 1 -> 1 run in a cycle"),
        ([node(1)], [edge(1, 8)], {}, "g.json, line 14: the edge dangles: the field destId is 8"),
        ([node(1), node(1)], [], {}, "g.json, line 12: node 1 was described on line 5 already"),
        (
            [node(1, fpgaLatency=-1.0)],
            [],
            {},
            "g.json, line 5: the field fpgaLatency is -1.0: it must be finite",
        ),
        ([node(1, size=float("nan"))], [], {}, "line 5: the field size is nan: it must be finite"),
        (
            [node(1, size=10**400)],
            [],
            {},
            "line 5: the field size is 1000.*: it must be at most 4503599627370496",
        ),
        ([node(1, size="8")], [], {}, "line 5: the field size is '8', which is not a number"),
        ([node(1, size=True)], [], {}, "line 5: the field size is True, which is not a number"),
        ([node(1, id=1.5)], [], {}, "line 5: the field id is 1.5: it must be a whole number"),
        (
            [node(1, isBackwardNode=2)],
            [],
            {},
            "line 5: the field isBackwardNode is 2: it must be true or false",
        ),
        (
            [{"id": 1, "size": 1.0, "isBackwardNode": 0}],
            [],
            {},
            "line 5: the field fpgaLatency is missing",
        ),
        ([node(1, supportedOnFpga=0)], [], {}, "line 5: the field supportedOnFpga of node 1 is 0"),
        ([node(1), 7], [], {}, "line 1: the field nodes holds 7, which is not an object"),
        (
            [node(1), node(2)],
            [{"sourceId": 1, "destId": 2}],
            {},
            r"line \d+: the field cost is missing",
        ),
        (
            [node(1, 1), node(2, 1, backward=True)],
            [edge(2, 1)],
            {},
            "from backward node 2 to forward node 1",
        ),
        ([], [], {}, "line 1: the field nodes holds no forward node"),
        (
            [node(1), node(2)],
            [edge(1, 2, cost=1e-320, size=64.0)],
            {},
            "is more than 4503599627370496 bytes",
        ),
        (
            [node(1), node(2)],
            [edge(1, 2, cost=1e12)],
            {},
            r"line \d+: the field cost is 1e\+12: at the 1.6e\+10 bytes per second that are assumed",
        ),
        (
            [node(1), node(2), node(3)],
            [edge(1, 2, cost=1e12), edge(2, 3, cost=2.0, size=1e9)],
            {},
            r"the field cost is 1e\+12: at the 5e\+11 bytes per second of this file's edges",
        ),
        ([node(1)], [], {"maxFPGAs": 0}, "line 1: the field maxFPGAs is 0"),
        (
            [node(1)],
            [],
            {"maxSizePerFPGA": None},
            "line 1: the field maxSizePerFPGA is None, which is not a number",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_field(
    nodes: list, edges: list, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(nodes, edges, **fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [\n}', "g.json, line 2: this is not JSON"),
        ('["nodes"]', "g.json, line 1: the file must hold a JSON object"),
        ('{"maxFPGAs": 1}', "g.json, line 1: the field maxSizePerFPGA is missing"),
        (
            '{"maxSizePerFPGA": 1, "maxFPGAs": 1, "nodes": {}}',
            r"g.json, line 1: the field nodes is \{\}: it must be a list",
        ),
        ('{"a": 1,\n"a": 2}', "^g.json, line 1: the field a appears twice"),
        (
            '{"maxFPGAs": 1,\n"maxSizePerFPGA": -' + "9" * 5000 + "}",
            "^g.json, line 1: the field maxSizePerFPGA is -inf: it must be finite",
        ),
        ("[" * 10**5, "g.json, line 1: this JSON is nested too deeply"),
    ],
)
def test_what_is_no_graph_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_graph_json(text, "g.json")


def test_braces_in_names_do_not_shift_lines() -> None:
    with pytest.raises(ValueError, match="line 13: the field size is missing"):
        read([node(1, name='{ "{'), {"id": 2, "fpgaLatency": 1.0, "isBackwardNode": 0}])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[int, tuple[int, int, int, int]], set[tuple[int, int]]]:
    """Forward nodes (ms, bytes, and the same of their backward), edges to higher numbers."""
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
    amount = st.integers(0, 10**9)
    nodes = {n: draw(st.tuples(amount, amount, amount, amount)) for n in numbers}
    pairs = [(a, b) for a in numbers for b in numbers if a < b]
    return nodes, set(draw(st.lists(st.sampled_from(pairs)))) if pairs else set()


@settings(max_examples=60, deadline=None)
@given(graphs(), st.permutations(range(16)))
def test_what_was_written_is_read(
    graph: tuple[dict, set[tuple[int, int]]], places: list[int]
) -> None:
    nodes, edges = graph
    written = [node(n, n, fpgaLatency=f, size=size) for n, (f, size, _, _) in nodes.items()]
    written += [
        node(n + 100, n, True, fpgaLatency=b, size=size) for n, (_, _, b, size) in nodes.items()
    ]
    shuffled = [written[place] for place in places if place < len(written)]
    mirrored = [edge(b + 100, a + 100) for a, b in edges]
    costs = read(shuffled, [edge(a, b, cost=3, size=6) for a, b in edges] + mirrored).costs
    assert costs.ids == tuple(sorted(nodes))
    for n, layer in zip(costs.ids, costs.layers, strict=True):
        found = (layer.forward_s, layer.parameter_bytes, layer.backward_s, layer.gradient_bytes)
        forward, size, backward, gradient = nodes[n]
        assert found == (forward / 1e3, size, backward / 1e3, gradient)
    assert {(costs.ids[e.producer], costs.ids[r]) for e in costs.edges for r in e.readers} == edges
    assert {e.bytes for e in costs.edges} <= {6}


def test_bert_in_training_is_read_whole() -> None:
    path = profile("dnn_partitioning_bert24_training.json")
    raw = json.loads(Path(path).read_text())
    found = read_graph(path)
    assert (found.devices, found.memory_limit_bytes, found.costs.ids) == (
        6,
        17185374208,
        tuple(range(1, 33)),
    )
    assert found.costs.together == ()
    total_s = sum(layer.forward_s + layer.backward_s for layer in found.costs.layers)
    assert total_s == pytest.approx(sum(n["fpgaLatency"] for n in raw["nodes"]) / 1e3)
    held = sum(layer.parameter_bytes + layer.gradient_bytes for layer in found.costs.layers)
    assert held == sum(n["size"] for n in raw["nodes"])
    cost = {(e["sourceId"], e["destId"]): e["cost"] / 1e3 for e in raw["edges"]}
    for e in found.costs.edges:
        for reader in e.readers:
            ends = found.costs.ids[e.producer], found.costs.ids[reader]
            assert found.link.seconds(e.bytes) == pytest.approx(cost[ends], rel=1e-6, abs=1e-12)
