"""The parsers of the systems themselves, in environments of their own: `make peers` makes those."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jvpipe.ir.plan import Plan
from jvpipe.ir.task import text
from jvpipe.schedules import find_schedule
from tests.exports.plans import outline, plan

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.thorough
MEGATRON = """
import importlib.util, json, sys, types
from pathlib import Path
at = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))) / "core"
for name in ("megatron.core", "megatron.core.transformer", "megatron.core.parallel_state"):
    sys.modules[name] = types.ModuleType(name)  # the rest of it wants a GPU's libraries
sys.modules["megatron.core"].parallel_state = sys.modules["megatron.core.parallel_state"]
for name in ("enums", "pipeline_parallel_layer_layout"):
    full = f"megatron.core.transformer.{name}"
    spec = importlib.util.spec_from_file_location(full, at / "transformer" / f"{name}.py")
    sys.modules[full] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
layout = module.PipelineParallelLayerLayout(sys.argv[1], int(sys.argv[2]))
layout.validate_layer_layout(int(sys.argv[3]), 0)
print(json.dumps([[[x.name for x in chunk] for chunk in rank] for rank in layout.layout]))
"""
JAXPP = """
import sys
space = {}
exec(compile(open(sys.argv[1]).read(), "plan.py", "exec"), space)
from jaxpp.schedules import preprocess_schedule_tasks
tasks = preprocess_schedule_tasks(space["SCHEDULE"].tasks(int(sys.argv[2])), 0, True)
for line in tasks:
    print(*(f"{t.stage_id}{t.fwd_or_bwd.name}{t.mubatch_idx}" for t in line))
"""


def run(peer: str, *arguments: str) -> str:
    """What the Python of a system's environment prints; the test is skipped where there is none."""
    python = ROOT / "build" / "peers" / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with {peer}: make peers")
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_torch_loads_and_simulates_every_csv_and_adds_the_same_sends(
    tmp_path: Path, devices: int
) -> None:
    files = []
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"):
        rule = find_schedule(name)
        stages, microbatches = rule.stages_on(devices), 2 * devices
        given = plan([2, *[1] * (stages - 2), 13 - stages], name)
        given = replace(given, outline=outline(6, microbatches))
        (path := tmp_path / f"{name}.csv").write_text(given.export("torch-csv"))
        lists = [text(tasks) for tasks in rule.tasks(devices, microbatches)]
        files.append(json.dumps([str(path), [stages, microbatches], lists]))
    told = run("torch", str(Path(__file__).with_name("read_by_torch.py")), *files)
    read = [json.loads(line) for line in told.splitlines()]
    assert len(read) == 6
    assert all(each["as_torch"] and each["steps"] > 0 for each in read), read


@pytest.mark.parametrize(
    ("cuts", "devices", "schedule"),
    [
        ([5, 4, 5], [0, 1, 2], "zb-h1"),
        ([7, 7], [1, 0], "1f1b"),
        ([3, 4, 2, 5], [0, 1, 1, 0], "v-half"),
        ([3, 2, 2, 2, 2, 3], [0, 1, 0, 1, 0, 1], "interleaved-3"),
    ],
)
def test_torch_runs_the_csv_and_has_the_gradients_of_the_whole_batch(
    tmp_path: Path, cuts: list[int], devices: list[int], schedule: str
) -> None:
    """Without REDUCE_GRAD they were as many times too large as there are micro-batches."""
    given = Plan.from_cuts(cuts, devices, schedule=schedule, outline=outline(6, 4))
    (path := tmp_path / "schedule.csv").write_text(given.export("torch-csv"))
    script = Path(__file__).with_name("run_by_torch.py")
    assert float(run("torch", str(script), str(path), str(len(cuts)), "4")) < 1e-6


@pytest.mark.parametrize(
    ("cuts", "schedule", "ranks"),
    [
        (
            [3, 6, 5],
            "1f1b",
            [["embedding", "decoder"], ["decoder"] * 3, ["decoder"] * 2 + ["loss"]],
        ),
        ([1, 12, 1], "1f1b", [["embedding"], ["decoder"] * 6, ["loss"]]),
    ],
)
def test_megatron_parses_and_validates_layouts(
    cuts: list[int], schedule: str, ranks: list[list[str]]
) -> None:
    words = plan(cuts, schedule).export("megatron").split()
    layout = words[words.index("--pipeline-model-parallel-layout") + 1].strip("'")
    told = run("megatron", "-c", MEGATRON, layout, "3", "6")
    assert json.loads(told) == [[rank] for rank in ranks]


def test_megatron_puts_two_chunks_on_a_rank_as_we_do() -> None:
    words = plan([3, 4, 2, 5], "interleaved").export("megatron").split()
    layout = words[words.index("--pipeline-model-parallel-layout") + 1].strip("'")
    told = json.loads(run("megatron", "-c", MEGATRON, layout, "2", "6"))
    assert [[row.count("decoder") for row in rank] for rank in told] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_jaxpp_takes_the_order(tmp_path: Path, schedule: str) -> None:
    rule = find_schedule(schedule)
    cuts = [5, 4, 5] if rule.chunks == 1 else [3, 2, 2, 2, 2, 3]
    given = replace(plan(cuts, schedule), outline=outline(6, 6))
    (path := tmp_path / "planned.py").write_text(given.export("jaxpp"))
    lines = run("jaxpp", "-c", JAXPP, str(path), "6").splitlines()
    split = rule.splits(3, 6)
    names = {"F": "FWD", "B": "BWD_I" if split else "BWD", "I": "BWD_I", "W": "BWD_W"}
    expected = [
        " ".join(f"{task.stage}{names[task.kind]}{task.microbatch}" for task in tasks)
        for tasks in rule.tasks(3, 6)
    ]
    assert lines == expected  # of a whole backward JaxPP keeps I, which it runs with W in it
