"""The command line `python -m jvpipe.plan`."""

import json
from pathlib import Path

import pytest

from jvpipe.plan import main
from tests.profiles import profile

GRAPH = """\
node1 -- Input -- forward_compute_time=5.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- Linear(4, 4) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=64.0
node3 -- ReLU -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=0.0
node4 -- Linear(4, 4) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=100.0, parameter_size=64.0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""
FIELDS = ["layers", "devices", "forward_s", "backward_s", "recompute_s", "swap_s", "comm_s", "peak_bytes", "in_flight"]


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return str(path)


def test_a_graph_file_is_planned(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, trace = (str(tmp_path / name) for name in ("plan.json", "plan.png", "timeline.json"))
    wanted = ["--json", out, "--figure", picture, "--timeline", trace]
    assert main(["--graph", graph, "--stages", "2", "--schedule", "pipedream", *wanted]) == 0
    found = json.loads(Path(out).read_text())
    assert [stage["layers"] for stage in found["stages"]] == [[1, 2, 3], [4]]  # the file's node ids
    assert (found["planner"], found["schedule"], found["feasible"]) == ("jvpipe", "pipedream", True)
    assert found["bottleneck_s"] == pytest.approx(6e-3)
    assert found["step_s"] == pytest.approx(8 * 6e-3)
    assert found["lower_bound_s"] <= found["step_s"] * (1 + 1e-9)
    assert 0 <= found["bubble_fraction"] < 0.1
    assert found["planning_s"] > 0
    for stage in found["stages"]:
        assert set(FIELDS) <= set(stage)
    assert Path(picture).read_bytes()[:4] == b"\x89PNG"
    assert json.loads(Path(trace).read_text())["traceEvents"]
    shown = capsys.readouterr().out
    assert "layer 4 (Linear(4, 4)) goes to stage 1 because" in shown
    assert "no plan is under" in shown


def test_planners_are_compared(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plans.json"
    assert main(["--graph", graph, "--stages", "2", "--compare", "all", "--json", str(out)]) == 0
    names = [found["planner"] for found in json.loads(out.read_text())]
    assert names[0] == "even"
    assert names[-1] == "jvpipe"
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_a_model_is_planned_at_its_real_size_without_its_parameters(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = ["--model", "bert", "--size", "base", "--stages", "4", "--microbatches", "8", "--batch-size", "64"]
    assert main([*options, "--hardware", "a100-40gb", "--memory-limit", "2GiB", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert sum(len(stage["layers"]) for stage in found["stages"]) > 24
    assert all(stage["peak_bytes"] <= 2 * 2**30 for stage in found["stages"])


def test_a_limit_that_nothing_meets_is_an_answer(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["--graph", graph, "--stages", "2", "--memory-limit", "50B", "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert not found["feasible"]
    assert found["stages"] == []
    smallest = found["smallest_limit_bytes"]
    assert f"smallest limit that would do is {smallest} bytes" in capsys.readouterr().err
    assert main(["--graph", graph, "--stages", "2", "--memory-limit", f"{smallest}B", "--json", str(out)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of --model and --graph"),
        (["--model", "bert", "--graph", "x"], "give one of --model and --graph"),
        (["--model", "brt"], "unknown model 'brt': did you mean 'bert'"),
        (["--graph", "nowhere.txt"], "nowhere.txt"),
        (["--graph", "GRAPH", "--stages", "9"], "9 stages: there can be 1 to 4"),
        (["--graph", "GRAPH", "--stages", "0"], "0 stages: there can be 1 to 4"),
        (["--graph", "GRAPH", "--planner", "vpip"], "unknown planner 'vpip': did you mean 'vpipe'"),
        (["--graph", "GRAPH", "--schedule", "2b"], "unknown schedule '2b': did you mean '2bw'"),
        (["--graph", "GRAPH", "--compare", "even,jvpip"], "unknown planner 'jvpip'"),
        (["--graph", "GRAPH", "--hardware", "a100"], "a100-40gb"),
        (["--graph", "GRAPH", "--memory-limit", "lots"], "is not a size"),
        (["--model", "bert", "--hardware", "a100-40gb", "--stages", "9", "--batch-size", "8"], "a100-40gb has 8"),
        (["--model", "bert", "--microbatches", "7", "--batch-size", "8"], "7 micro-batches do not divide the 8"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    options: list[str], message: str, graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([graph if option == "GRAPH" else option for option in options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("name", ["resnet50", "vgg16", "gnmt"])
def test_the_profiles_slowest_stage_is_the_exact_optimum(name: str, stages: int, tmp_path: Path) -> None:
    from jvpipe.cost.graph_file import read_graph

    path, out = profile(f"pipedream_{name}.graph.txt"), tmp_path / "plan.json"
    assert main(["--graph", str(path), "--stages", str(stages), "--schedule", "pipedream", "--json", str(out)]) == 0
    seconds = [layer.forward_s + layer.backward_s for layer in read_graph(path).costs.layers]
    total = [sum(seconds[:i]) for i in range(len(seconds) + 1)]
    best = total
    for _ in range(stages - 1):  # best[j]: the least slowest stage of the first j layers
        best = [min((max(best[i], total[j] - total[i]) for i in range(j)), default=0.0) for j in range(len(total))]
    assert json.loads(out.read_text())["bottleneck_s"] == pytest.approx(best[-1], rel=1e-9)
