"""The command line `python -m jvpipe.plan`."""

import json
from pathlib import Path

import jax
import pytest

from jvpipe.cli.job import stay_on_cpus
from jvpipe.cli.plan_command import main
from tests.real_profiles import profile

GRAPH = """\
node1 -- Input -- forward_compute_time=5.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- Linear(4, 4) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=64.0
node3 -- ReLU -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=0.0
node4 -- Linear(4, 4) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=100.0, parameter_size=64.0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""
FIELDS = [
    "layers",
    "devices",
    "forward_s",
    "backward_s",
    "recompute_s",
    "swap_s",
    "comm_s",
    "peak_bytes",
    "in_flight",
    "update_s",
]


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return str(path)


def test_a_graph_file_is_planned(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture, trace = (
        str(tmp_path / name) for name in ("plan.json", "plan.png", "timeline.json")
    )
    wanted = ["--json", out, "--figure", picture, "--timeline", trace]
    assert main(["--graph", graph, "--stages", "2", "--schedule", "pipedream", *wanted]) == 0
    found = json.loads(Path(out).read_text())
    assert [stage["layers"] for stage in found["stages"]] == [[1, 2, 3], [4]]  # the file's node ids
    assert (found["planner"], found["schedule"], found["feasible"]) == ("jvpipe", "pipedream", True)
    assert found["bottleneck_s"] == pytest.approx(6e-3)
    assert found["step_s"] == pytest.approx(4 * 6e-3)
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


def test_few_microbatches_of_a_graph_file_are_warned_of(
    graph: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        main(["--graph", graph, "--stages", "3", "--microbatches", "2", "--planner", "even"]) == 0
    )
    assert "2 micro-batches leave 3 devices idle for about 50% of a step under 1f1b" in caplog.text
    assert caplog.text.count("devices idle") == 1


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        (
            ("--schedule", "interleaved", "--stages", "3"),
            "interleaved needs 2 x 3 = 6 stages, but the model has 4 layers",
        ),
        (
            ("--schedule", "zb-v", "--stages", "3"),
            "this schedule has two chunks per device. Use fewer devices",
        ),
    ],
)
def test_more_chunks_than_layers_are_a_mistake_of_one_line(
    graph: str, options: tuple[str, ...], mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--graph", graph, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mistake in line


def test_planners_are_compared_and_the_best_is_shown(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace, picture = (tmp_path / name for name in ("plans.json", "timeline.json", "plan.svg"))
    wanted = ["--json", str(out), "--timeline", str(trace), "--figure", str(picture)]
    options = [
        "--graph",
        graph,
        "--stages",
        "3",
        "--microbatches",
        "2",
        "--compare",
        "all",
        "--memory-limit",
        "400",
    ]
    assert main([*options, *wanted]) == 0
    shown = capsys.readouterr()
    answers = json.loads(out.read_text())
    assert len(answers) == 10
    assert all(found["planner"] in shown.out for found in answers)
    assert "no plan" not in shown.err
    fit = [found for found in answers if found["feasible"]]
    assert answers[: len(fit)] == sorted(fit, key=lambda found: found["step_s"])
    others = answers[len(fit) :]
    assert any(found["stages"] for found in others), "some planners look at no limit"
    assert min(x["step_s"] for x in others if x["stages"]) <= fit[0]["step_s"], (
        "and are as fast or faster for it"
    )
    assert f"1f1b, {fit[0]['planner']}" in picture.read_text()
    equal = [found["planner"] for found in fit if found["step_s"] == fit[0]["step_s"]]
    assert equal[0] == "jvpipe", "of equals its own plan is told"
    assert len(equal) > 1
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(
        1e6 * fit[0]["step_s"]
    )


def test_of_planners_that_all_fail_the_smallest_limit_is_named(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["--graph", graph, "--stages", "2", "--compare", "all", "--memory-limit", "50B"]) == 1
    )
    assert "smallest limit that would do is" in capsys.readouterr().err


def test_a_plan_over_the_limit_is_no_plan(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    options = [
        "--graph",
        graph,
        "--stages",
        "2",
        "--planner",
        "even",
        "--memory-limit",
        "50B",
        "--json",
        str(out),
    ]
    assert main(options) == 1
    error = capsys.readouterr().err
    assert error.startswith("no plan: even looks at no limit: its plan takes ")
    assert error.count("\n") == 1
    found = json.loads(
        out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert (found["feasible"], found["lower_bound_s"]) == (False, None)


@pytest.mark.thorough
def test_a_model_is_planned_at_its_real_size_without_its_parameters(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = [
        "--model",
        "bert",
        "--size",
        "base",
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--batch-size",
        "64",
    ]
    assert (
        main([*options, "--hardware", "a100-40gb", "--memory-limit", "2GiB", "--json", str(out)])
        == 0
    )
    found = json.loads(out.read_text())
    assert sum(len(stage["layers"]) for stage in found["stages"]) > 24
    assert all(stage["peak_bytes"] <= 2 * 2**30 for stage in found["stages"])


def test_a_limit_that_nothing_meets_is_an_answer(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert (
        main(["--graph", graph, "--stages", "2", "--memory-limit", "50B", "--json", str(out)]) == 1
    )
    found = json.loads(out.read_text())
    assert not found["feasible"]
    assert found["stages"] == []
    smallest = found["smallest_limit_bytes"]
    assert f"smallest limit that would do is {smallest} bytes" in capsys.readouterr().err
    assert (
        main(
            [
                "--graph",
                graph,
                "--stages",
                "2",
                "--memory-limit",
                f"{smallest}B",
                "--json",
                str(out),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of --model and --graph"),
        (["--model", "bert", "--graph", "x"], "give one of --model and --graph"),
        (["--model", "brt"], "unknown model 'brt': did you mean 'bert'"),
        (["--graph", "nowhere.txt"], "nowhere.txt"),
        (["--graph", "GRAPH", "--stages", "9"], "9 stages: there can be 1 to 4"),
        (
            ["--graph", "GRAPH", "--stages", "0"],
            "--stages must be a whole number of at least 1, not 0",
        ),
        (
            ["--graph", "GRAPH", "--microbatches", "-3"],
            "--microbatches must be a whole number of at least 1, not -3",
        ),
        (
            ["--graph", "GRAPH", "--microbatches", "1000000000"],
            "--microbatches must be a whole number of at most 100000, not 1000000000",
        ),
        (["--graph", "GRAPH", "--batch-size", "8"], "--batch-size 8 is for --model"),
        (["--graph", "GRAPH", "--size", "large"], "--size large is for --model"),
        (["--graph", "GRAPH", "--dtype", "bfloat16"], "--dtype bfloat16 is for --model"),
        (["--graph", "GRAPH", "--frozen", "base/*"], "--frozen base/* is for --model"),
        (
            ["--model", "bert", "--batch-size", "8", "--frozen", "bloks/*"],
            "frozen pattern 'bloks/*' matches no parameter: did you mean 'blocks/",
        ),
        (
            ["--model", "bert", "--batch-size", "0"],
            "--batch-size must be a whole number of at least 1, not 0",
        ),
        (
            ["--model", "bert", "--batch-size", "-8"],
            "--batch-size must be a whole number of at least 1, not -8",
        ),
        (
            ["--model", "bert", "--batch-size", "1000000000", "--microbatches", "7"],
            "the nearest that do are 5 and 8",
        ),
        (
            ["--graph", "GRAPH", "--stages", "4", "--schedule", "2bw", "--microbatches", "3"],
            "needs at least 4 micro",
        ),
        (
            ["--graph", "GRAPH", "--memory-limit", "1" + 400 * "0"],
            "more than 4503599627370496 bytes",
        ),
        (
            ["--graph", "FOLDER"],
            "this cannot be read (Is a directory): give the path of a graph file",
        ),
        (["--graph", "\0"], "--graph must be a text"),
        (["--graph", "GRAPH", "--planner", "vpip"], "unknown planner 'vpip': did you mean 'vpipe'"),
        (["--graph", "GRAPH", "--schedule", "2b"], "unknown schedule '2b': did you mean '2bw'"),
        (["--graph", "GRAPH", "--compare", "even,jvpip"], "unknown planner 'jvpip'"),
        (["--graph", "GRAPH", "--hardware", "a100"], "a100-40gb"),
        (["--graph", "GRAPH", "--memory-limit", "lots"], "is not a size"),
        (
            ["--model", "bert", "--hardware", "a100-40gb", "--stages", "9", "--batch-size", "8"],
            "a100-40gb has 8",
        ),
        (
            ["--model", "bert", "--microbatches", "7", "--batch-size", "8"],
            "7 micro-batches do not divide the 8",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    options: list[str], message: str, graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"GRAPH": graph, "FOLDER": str(Path(graph).parent)}
    assert main([places.get(option, option) for option in options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.thorough
def test_what_is_frozen_takes_less(tmp_path: Path) -> None:
    peaks = []
    for more in ([], ["--frozen", "blocks/*", "--frozen", "embeddings/*"]):
        out = tmp_path / "plan.json"
        options = ["--model", "bert", "--batch-size", "8", "--stages", "2", "--json", str(out)]
        assert main([*options, *more]) == 0
        peaks.append(sum(stage["peak_bytes"] for stage in json.loads(out.read_text())["stages"]))
    assert peaks[1] < peaks[0] / 2


PLANNING = "jvpipe.cli.plan_command.of_graph"
"""What a mistake that can be seen before any work must not come to."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "FOLDER"], "this is a folder: give the path of a file"),
        (["--timeline", ""], "--timeline is the empty text '': give a path"),
        (["--timeline", "."], "this is a folder: give the path of a file"),
        (
            ["--json", "FOLDER/nowhere/plan.json"],
            "there is no folder FOLDER/nowhere: make it, or give another path",
        ),
        (["--figure", "/proc/plan.png"], "the file cannot be written (No such file or directory)"),
        (["--figure", "FOLDER/plan.json"], "no picture ends in '.json', use one of"),
        (["--figure", "FOLDER/plan"], "no picture ends in '', use one of"),
        (
            ["--json", "FOLDER/a.json", "--timeline", "FOLDER/a.json"],
            "--json names the same file; give another path",
        ),
        (["--json", "GRAPH"], "--graph names the same file; give another path"),
        (["--compare", "even,jvpip"], "unknown planner 'jvpip'"),
        (["--schedule", "2bw", "--microbatches", "1", "--stages", "3"], "Use microbatches=3"),
    ],
)
def test_what_can_be_seen_at_once_is_said_before_any_work(
    options: list[str],
    message: str,
    graph: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PLANNING, lambda *_: pytest.fail("planning began"))
    before = sorted(tmp_path.iterdir())

    def filled(text: str) -> str:
        return text.replace("FOLDER", str(tmp_path)).replace("GRAPH", graph)

    assert main(["--graph", graph, *map(filled, options)]) == 2
    error = capsys.readouterr().err
    assert filled(message) in error
    assert error.count("\n") == 1
    assert (sorted(tmp_path.iterdir()), Path(graph).read_text()) == (before, GRAPH)


@pytest.mark.parametrize("option", ["--json", "--timeline"])
def test_a_full_disk_is_one_line(
    option: str, graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    assert main(["--graph", graph, "--stages", "2", option, "/dev/full"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {option} /dev/full: the file cannot be written (No space left on device)\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "activation_size=100.0",
            "activation_size=1e308",
            "graph.txt, line 2: activation_size='1e308' must be at most",
        ),
        (
            "forward_compute_time=1.0",
            "forward_compute_time=1e306",
            "forward_compute_time='1e306' must be at most",
        ),
        (
            "parameter_size=64.0",
            "parameter_size=4e15",
            "bytes with 2 micro-batches in flight, at most",
        ),
        (
            "forward_compute_time=1.0",
            "forward_compute_time=4e15",
            "the layers compute for 3.2e+13 s in 4 micro",
        ),
    ],
)
def test_numbers_that_nothing_takes_are_refused(
    old: str, new: str, message: str, graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(graph).write_text(GRAPH.replace(old, new))
    assert main(["--graph", graph, "--stages", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_links_that_never_end_are_refused(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "bytes_per_s = 1e9\nlatency_s = 1e12"
    links = "\n".join(f"[{name}]\n{slow}" for name in ("host", "peer"))
    (tmp_path / "slow.toml").write_text(f'devices_per_machine = 4\ndevice = "a100-40gb"\n{links}')
    assert main(["--graph", graph, "--stages", "2", "--hardware", str(tmp_path / "slow.toml")]) == 2
    assert (
        "links between stages are busy for 1.6e+13 s in 4 micro-batches" in capsys.readouterr().err
    )


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("name", ["resnet50", "vgg16", "gnmt"])
def test_the_profiles_slowest_stage_is_the_exact_optimum(
    name: str, stages: int, tmp_path: Path
) -> None:
    from jvpipe.profiles.graph_file import read_graph

    path, out = profile(f"pipedream_{name}.graph.txt"), tmp_path / "plan.json"
    assert (
        main(
            [
                "--graph",
                str(path),
                "--stages",
                str(stages),
                "--schedule",
                "pipedream",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    seconds = [layer.forward_s + layer.backward_s for layer in read_graph(path).costs.layers]
    total = [sum(seconds[:i]) for i in range(len(seconds) + 1)]
    best = total
    for _ in range(stages - 1):  # best[j]: the least slowest stage of the first j layers
        best = [
            min((max(best[i], total[j] - total[i]) for i in range(j)), default=0.0)
            for j in range(len(total))
        ]
    assert json.loads(out.read_text())["bottleneck_s"] == pytest.approx(best[-1], rel=1e-9)


@pytest.mark.parametrize(("named", "used"), [(None, "cpu"), ("cuda,cpu", "cuda,cpu")])
def test_a_plan_wakes_no_plugin_unless_platforms_are_named(named: str | None, used: str) -> None:
    before = jax.config.values["jax_platforms"]
    try:
        jax.config.update("jax_platforms", named)
        stay_on_cpus()
        assert jax.config.values["jax_platforms"] == used
    finally:
        jax.config.update("jax_platforms", before)
