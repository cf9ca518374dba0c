"""PipeDream's graph.txt: what is read, in which order, and what is wrong with bad ones."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.papers.pipedream_cuts import pipedream
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.profiles.graph_file import read_graph
from jvpipe.profiles.graph_txt import read_graph_txt
from jvpipe.schedules import find_schedule
from tests.real_profiles import profile

NUMBERS = (
    "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=4.0"
)


def text(*lines: str) -> str:
    return "\n".join(line.replace("NUMBERS", NUMBERS) for line in lines)


def node(number: int | str, **fields: str) -> str:
    """A node's line with some fields changed."""
    found = {
        name: value for name, _, value in (pair.partition("=") for pair in NUMBERS.split(", "))
    } | fields
    return f"node{number} -- Add -- " + ", ".join(
        f"{name}={value}" for name, value in found.items()
    )


def test_a_node_becomes_a_layer_that_may_keep_swap_or_recompute() -> None:
    costs = read_graph_txt(
        "node4 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=22.0, "
        "backward_compute_time=24.5, activation_size=[100.0; 20.0; 3.0], parameter_size=7.000 -- "
        "stage_id=3",
        "graph.txt",
    ).costs
    (layer,) = costs.layers
    assert (layer.name, costs.ids) == ("Conv2d(3, 64, kernel_size=(3, 3))", (4,))
    assert (layer.forward_s, layer.backward_s) == (0.022, 0.0245)
    assert (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes) == (7, 7, 0)
    keep, swap, recompute = layer.options
    assert (keep.kept_bytes, keep.swapped_bytes, keep.extra_s, keep.fates) == (123, 0, 0.0, {})
    assert (swap.kept_bytes, swap.swapped_bytes, swap.fates) == (0, 123, {"node4": "swap"})
    assert (recompute.kept_bytes, recompute.extra_s, recompute.extra_bytes) == (0, 0.022, 123)
    assert recompute.fates == {"node4": "recompute"}


def test_the_loader_is_no_work_and_its_batch_has_no_cotangent() -> None:
    lines = [
        "node1 -- Input0 -- NUMBERS",
        "node2 -- InputProjection -- NUMBERS",
        "\tnode1 -- node2",
    ]
    costs = read_graph_txt(text(*lines), "graph.txt").costs
    assert [(layer.forward_s, layer.backward_s) for layer in costs.layers] == [
        (0.0, 0.0),
        (0.001, 0.002),
    ]
    assert [(edge.bytes, edge.differentiable) for edge in costs.edges] == [(8, False)]


@pytest.mark.parametrize("indent", ["\t", "  ", " \t", "    "])
def test_edges_are_indented_in_any_way(indent: str) -> None:
    costs = read_graph_txt(text(node(1), node(2), f"{indent}node1 -- node2"), "graph.txt").costs
    assert [(edge.producer, edge.readers) for edge in costs.edges] == [(0, (1,))]


def test_stale_edges_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    lines = [node(1), node(2), "\tnode1 -- node2", "\tnode2 -- node2", "\tnode1 -- node2"]
    costs = read_graph_txt(text(*lines), "graph.txt").costs
    assert caplog.messages == [
        "graph.txt, line 4: the edge from node2 to itself is ignored: remove it"
    ]
    assert [(edge.producer, edge.readers) for edge in costs.edges] == [(0, (1,))]


def test_of_the_nodes_that_are_ready_the_lowest_comes_first() -> None:
    lines = [
        node(9),
        node(10),
        node(2),
        node(3),
        "\tnode10 -- node2",
        "\tnode9 -- node3",
        "\tnode10 -- node3",
    ]
    costs = read_graph_txt(text(*lines), "graph.txt").costs
    assert costs.ids == (9, 10, 2, 3)
    assert [(e.producer, e.readers) for e in costs.edges] == [(0, (3,)), (1, (2, 3))]


def test_a_description_may_hold_anything_but_the_end_of_a_line() -> None:
    name = "Emu(  (a): LSTM(8, 8), b=2) -- activation_size=9 -- x"
    costs = read_graph_txt(text(f"node1 -- {name} -- NUMBERS -- stage_id=0"), "graph.txt").costs
    assert costs.layers[0].name == name
    assert costs.layers[0].options[0].kept_bytes == 8


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([node(1), node(2), "\tnode1 -- node2", "\tnode2 -- node1"], r"g.txt, line [34]: .* cycle"),
        (
            [node(1), node(2), "", "\tnode1 -- node7"],
            "g.txt, line 4: the edge dangles: node7 is not described",
        ),
        ([node(1), node(1)], "g.txt, line 2: node1 was described on line 1 already"),
        (
            [node(1, forward_compute_time="-1")],
            "line 1: forward_compute_time='-1' must be finite and not negative",
        ),
        (
            [node(1, backward_compute_time="nan")],
            "line 1: backward_compute_time='nan' must be finite and not negative",
        ),
        (
            [node(1, parameter_size="inf")],
            "line 1: parameter_size='inf' must be finite and not negative",
        ),
        (
            [node(1, activation_size="[8.0; -1]")],
            "line 1: activation_size=.* must be finite and not negative",
        ),
        ([node(1, activation_size="[8.0; x]")], "line 1: activation_size=.* is not a number"),
        ([node(1, activation_size="[8.0; 4")], "line 1: activation_size=.* is not a number"),
        (
            [node(1, forward_compute_time="1_000")],
            "line 1: forward_compute_time='1_000' is not a number: write digits",
        ),
        (
            [node(1, parameter_size="\u0661\u0662")],
            "line 1: parameter_size=.* is not a number: write digits",
        ),
        ([node(1, activation_size="[8.0; 1_0]")], "line 1: activation_size=.* is not a number"),
        ([node(1, parameter_size="x" * 5000)], r"line 1: parameter_size='x{9,90}\.\.\.x+' is not"),
        ([node("9" * 5000)], "line 1: a line starts with `node` and a number"),
        ([node("\u0661")], "line 1: a line starts with `node` and a number"),
        ([node(1), node(2), "\tnode1 -- node\u0662"], "line 3: an indented line is an edge"),
        ([node(1, activation_size="[]")], "line 1: activation_size=.* is not a number"),
        ([node(1, parameter_size="[8.0; 4.0]")], "line 1: parameter_size=.* is not a number"),
        ([node(1, parameter_size="")], "line 1: parameter_size='' is not a number"),
        (
            [node(1), "node2 -- Add -- forward_compute_time=1"],
            "line 2: the field backward_compute_time is missing",
        ),
        ([node(1), "node2"], "line 2: the field forward_compute_time is missing"),
        ([node(1), "knot2 -- Add -- NUMBERS"], "line 2: a line starts with `node` and a number"),
        (
            [node(1), node(2), "\tnode1 -> node2"],
            "line 3: an indented line is an edge, `nodeA -- nodeB`",
        ),
        ([node(1), "\tnode1 -- node1 -- node1"], "line 2: an indented line is an edge"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_field(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_graph_txt(text(*lines), "g.txt")


def test_a_cycle_is_spelled_out() -> None:
    lines = [
        *map(node, (1, 2, 3, 4)),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode3 -- node2",
        "\tnode3 -- node4",
    ]
    with pytest.raises(
        ValueError, match=r"line [67]: the edges of nodes (2 -> 3 -> 2|3 -> 2 -> 3) run in a cycle"
    ):
        read_graph_txt(text(*lines), "g.txt")


DESCRIPTIONS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" -"), min_size=1
)


@st.composite
def graphs(
    draw: st.DrawFn,
) -> tuple[dict[int, tuple[str, int, int, list[int], int]], set[tuple[int, int]]]:
    """Nodes (description, forward ms, backward ms, activations, parameters) and edges to higher
    numbers.
    """
    amount = st.integers(0, 10**12)
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
    descriptions = DESCRIPTIONS.filter(lambda d: d.strip() == d and not d.startswith("Input"))
    sizes = st.lists(amount, min_size=1, max_size=3)
    nodes = {n: draw(st.tuples(descriptions, amount, amount, sizes, amount)) for n in numbers}
    pairs = [(a, b) for a in numbers for b in numbers if a < b]
    return nodes, set(draw(st.lists(st.sampled_from(pairs)))) if pairs else set()


@settings(max_examples=60, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_what_was_written_is_read(graph: tuple[dict, set[tuple[int, int]]], random: Random) -> None:
    nodes, edges = graph
    lines = [
        f"node{n} -- {name} -- forward_compute_time={f}, backward_compute_time={b}, "
        f"activation_size={a[0] if len(a) == 1 else '[' + '; '.join(map(str, a)) + ']'}, "
        f"parameter_size={p}"
        for n, (name, f, b, a, p) in nodes.items()
    ]
    lines += [f"\tnode{a} -- node{b}" for a, b in edges]
    random.shuffle(lines)
    costs = read_graph_txt("\n".join(lines), "graph.txt").costs
    assert costs.ids == tuple(
        sorted(nodes)
    )  # edges lead to higher numbers, so their order is topological
    for n, layer in zip(costs.ids, costs.layers, strict=True):
        name, forward, backward, activations, parameters = nodes[n]
        found = (
            layer.name,
            layer.forward_s,
            layer.backward_s,
            layer.options[0].kept_bytes,
            layer.parameter_bytes,
        )
        assert found == (name, forward / 1e3, backward / 1e3, sum(activations), parameters)
    assert {(costs.ids[e.producer], costs.ids[r]) for e in costs.edges for r in e.readers} == edges


def slowest_over_ideal(path: Path, stages: int) -> float:
    """The best contiguous cuts of the file's nodes, computed from the lines themselves."""
    times, waiting = {}, {}
    for line in path.read_text().splitlines():
        words = line.split(" -- ")
        if line[0].isspace():
            waiting[words[1]].add(words[0].strip())
        else:
            spent = [float(field.split("=")[1]) for field in words[-1].split(", ")[:2]]
            times[words[0]] = 0.0 if words[1].startswith("Input") else sum(spent)
            waiting.setdefault(words[0], set())
    done: list[str] = []
    while len(done) < len(times):
        ready = [n for n in times if n not in done and waiting[n] <= set(done)]
        done.append(min(ready, key=lambda n: int(n.removeprefix("node"))))
    sums = [0.0]
    for name in done:
        sums.append(sums[-1] + times[name])
    best = list(sums)
    for _ in range(stages - 1):
        best = [
            min(max(best[i], sums[j] - sums[i]) for i in range(j + 1)) for j in range(len(sums))
        ]
    return best[-1] / (sums[-1] / stages)


@pytest.mark.parametrize(
    ("name", "four", "eight"),
    [("resnet50", 1.006, 1.054), ("vgg16", 1.287, 1.898), ("gnmt", 1.157, 1.703)],
)
def test_pipedream_reaches_the_reference_ratios(name: str, four: float, eight: float) -> None:
    path = profile(f"pipedream_{name}.graph.txt")
    costs = read_graph(path).costs
    total_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
    for stages, ratio in ((4, four), (8, eight)):
        exact = slowest_over_ideal(path, stages)
        assert exact == pytest.approx(ratio, abs=5e-4)
        problem = Problem(costs, stages, find_schedule("pipedream"), 8)
        found = evaluate_decision(problem, pipedream(problem)).bottleneck_s / (total_s / stages)
        assert found == pytest.approx(exact, rel=1e-9)
