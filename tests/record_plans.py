"""A recorder of plans: what planners find on drawn problems, before and after a rebuilding of the
planner.

    python -m tests.record_plans record FILE      # on the code as it was
    python -m tests.record_plans compare FILE     # on the code as it is; experiments/planners/recorded.json is kept

Every problem is asked from outside, by the command line or by `plan_for`, so that nothing here
knows what a planner is made of. A line of FILE has the simulated seconds of a step, the most bytes
on a device, and the processor seconds that the planning took. `--only TEXT` takes the problems
whose names hold it.

`compare` fails if steps are longer in the mean by more than 0.2%, if one is by more than 0.5%, or
if a plan is gone.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import jvpipe
from jvpipe.cli import plan_command

Record = dict[str, Any]
SCHEDULES = (
    *("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half", "auto"),
    *("pipedream", "2bw", "pipemare", "xpipe"),
)
CHUNKED = ("interleaved", "zb-v", "v-half")
LIMITS = (None, 1.0, 0.8, 0.6)
"""Of what a device holds that keeps everything; None is no limit."""
MEAN, WORST = 1.002, 1.005
"""How much longer steps may be."""


def graph(rng: np.random.Generator, layers: int) -> str:
    """Draws a chain of layers, here and there with a skip connection, as a graph.txt."""
    lines = []
    for node in range(layers):
        forward_ms, ratio = rng.lognormal(1.0, 0.5), rng.uniform(1.5, 2.5)
        activation, parameters = rng.integers(1, 200) * 10**6, rng.integers(0, 50) * 10**6
        lines.append(
            f"node{node} -- Layer{node} -- forward_compute_time={forward_ms:.4f}, "
            f"backward_compute_time={forward_ms * ratio:.4f}, activation_size={activation}, "
            f"parameter_size={parameters}"
        )
    lines += [f"  node{node} -- node{node + 1}" for node in range(layers - 1)]
    if layers > 6 and rng.random() < 0.3:
        lines.append(f"  node1 -- node{layers - 2}")
    return "\n".join(lines) + "\n"


def cluster(
    rng: np.random.Generator, devices: int, *, unlike: bool = False, machines: int = 1
) -> str:
    """Draws a cluster file: links of some speed, and where that is asked every second device slower
    and smaller.
    """
    gbytes = rng.choice([2, 6, 12, 25, 100])
    fast = "{ like = 'v100-a', memory_bytes = '1TiB' }"
    slow = "{ like = '2080ti', name = 'slow', memory_bytes = '1TiB' }"
    if unlike:
        listed = ", ".join(slow if d % 2 else fast for d in range(devices))
        return f"devices = [{listed}]\nhost.bytes_per_s = 12e9\npeer.bytes_per_s = {gbytes}e9\n"
    lines = [
        f"device = {fast}",
        f"devices_per_machine = {devices // machines}",
        f"machines = {machines}",
    ]
    lines += [
        "host.bytes_per_s = 12e9",
        f"peer.bytes_per_s = {gbytes}e9",
        f"network.bytes_per_s = {gbytes / 4}e9",
    ]
    return "\n".join(lines) + "\n"


def chain(seed: int, schedule: str, limit: float | None, *, unlike: bool) -> Record:
    """Plans a drawn chain by the command line; a limit is a share of what the plan without one
    holds.
    """
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, 5)) * (1 if limit is None else 2)
    layers, microbatches = int(rng.integers(2, 5)) * stages * 2, stages * int(rng.integers(1, 5))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "graph.txt").write_text(graph(rng, layers))
        (folder / "cluster.toml").write_text(cluster(rng, stages, unlike=unlike))
        arguments = [
            "--graph",
            str(folder / "graph.txt"),
            "--hardware",
            str(folder / "cluster.toml"),
        ]
        arguments += [
            "--stages",
            str(stages),
            "--microbatches",
            str(microbatches),
            "--schedule",
            schedule,
        ]
        if limit is not None:
            free = commanded([*arguments, "--memory-limit", "1TiB"], folder)
            arguments += ["--memory-limit", str(int(limit * free["bytes"]))]
        return commanded(arguments, folder)


def commanded(arguments: list[str], folder: Path) -> Record:
    """What the command line answers."""
    out, start_s = folder / "plan.json", time.process_time()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        code = plan_command.main([*arguments, "--json", str(out)])
    assert code in (0, 1), said.getvalue()
    planning_s = time.process_time() - start_s
    told = json.loads(out.read_text())
    if not told["feasible"]:
        return {"feasible": False, "planning_s": planning_s}
    held = max(stage["peak_bytes"] for stage in told["stages"])
    return {"feasible": True, "step_s": told["step_s"], "bytes": held, "planning_s": planning_s}


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    """A chain of products."""
    for weights in params:
        batch = jnp.tanh(batch @ weights)
    return jnp.mean(batch**2)


def replicated(seed: int, devices: int, machines: int, limit: float | None) -> Record:
    """Plans a drawn chain of products for stages of several devices."""
    rng = np.random.default_rng(seed)
    layers, examples = int(rng.integers(4, 13)), 2 ** int(rng.integers(5, 9))
    widths = rng.choice([512, 1024, 2048, 4096], layers + 1)
    params = [jax.ShapeDtypeStruct((int(a), int(b)), jnp.float32) for a, b in pairwise(widths)]
    batch = jax.ShapeDtypeStruct((examples, 64, int(widths[0])), jnp.float32)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "cluster.toml"
        file.write_text(cluster(rng, devices, machines=machines))
        ask = partial(jvpipe.plan_for, loss_fn, params, batch, devices=devices, hardware=str(file))
        free = ask(memory_limit="1TiB").to_json()
        held = max(stage["peak_bytes"] for stage in free["stages"])
        start_s = time.process_time()
        forecast = ask(memory_limit="1TiB" if limit is None else int(limit * held))
    planning_s = time.process_time() - start_s
    told = forecast.to_json()
    if not told["feasible"]:
        return {"feasible": False, "planning_s": planning_s}
    held = max(stage["peak_bytes"] for stage in told["stages"])
    return {"feasible": True, "step_s": told["step_s"], "bytes": held, "planning_s": planning_s}


def cases() -> Iterator[tuple[str, Callable[[], Record]]]:
    """Yields the names of all problems, and what plans them."""
    seed = 0
    for schedule in SCHEDULES:
        for limit in LIMITS:
            for each in range(4):
                seed, unlike = seed + 1, each == 3
                name = f"chain {seed} {schedule} limit {limit}{' unlike' if unlike else ''}"
                yield name, partial(chain, seed, schedule, limit, unlike=unlike)
    for devices, machines in ((2, 1), (4, 1), (8, 2), (16, 4)):
        for limit in (None, 0.7):
            for _ in range(3):
                seed += 1
                name = f"replicas {seed} {devices} devices {machines} machines limit {limit}"
                yield name, partial(replicated, seed, devices, machines, limit)


def record(only: str = "") -> dict[str, Record]:
    """Plans the problems whose names hold `only`."""
    told = {}
    for name, plan in cases():
        if only in name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told[name] = plan()
            print(name, told[name].get("step_s"), f"{told[name]['planning_s']:.2f} s", flush=True)
    return told


def summary(old: dict[str, Record], new: dict[str, Record]) -> tuple[list[str], bool]:
    """What has become of steps and of the seconds of planning, in lines, and whether that will do.

    >>> before, after = {"step_s": 1.0, "planning_s": 2.0}, {"step_s": 1.01, "planning_s": 1.0}
    >>> summary({"a": {"feasible": True, **before}}, {"a": {"feasible": True, **after}})
    (['a: step 1.0100 of what it was', '1 steps: mean 1.0100, worst 1.0100; planning 0.50 of the seconds'], False)
    """
    both = [name for name in old if name in new]
    gone = [name for name in both if old[name]["feasible"] and not new[name]["feasible"]]
    planned = [name for name in both if old[name]["feasible"] and new[name]["feasible"]]
    ratios = {name: new[name]["step_s"] / old[name]["step_s"] for name in planned}
    lines = [f"{name}: there was a plan, now there is none" for name in gone]
    lines += [
        f"{name}: step {x:.4f} of what it was"
        for name, x in ratios.items()
        if abs(x - 1) > WORST - 1
    ]
    spent_s = [sum(each[name]["planning_s"] for name in both) for each in (old, new)]
    mean, worst = fmean(ratios.values()), max(ratios.values())
    share = spent_s[1] / spent_s[0]
    lines.append(
        f"{len(ratios)} steps: mean {mean:.4f}, worst {worst:.4f}; planning {share:.2f} of the "
        "seconds"
    )
    return lines, not gone and mean <= MEAN and worst <= WORST


def main(arguments: list[str] | None = None) -> int:
    """Records, or compares; the exit code is 1 if plans have become worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.record_plans", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    told = record(options.only)
    if options.action == "record":
        options.file.write_text(json.dumps(told, indent=1) + "\n")
        return 0
    lines, well = summary(json.loads(options.file.read_text()), told)
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
