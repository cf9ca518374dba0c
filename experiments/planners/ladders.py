"""Whether a plan is slower where more is allowed.

    python -m experiments.planners.ladders limits|devices

A ladder of limits plans a profile under ten memory limits, from the least that has a plan to what a
plan without a limit holds, and under none. A ladder of devices plans a model for 1 to 16 devices of
two kinds of cluster, which may be left idle. No step may be longer than that of a rung below.

Everything is asked by the command line, as users ask it. Profiles of others are those of
`experiments/planners/profiles`; chains are drawn.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro

from experiments.planners.profiles import profiles_folder
from jvpipe.cli import plan_command

DRAWN, RUNGS, STAGES = 8, 10, 4
SCHEDULES = ("1f1b", "zb-h1", "auto")
MODELS = ("bert", "gpt2", "vgg", "resnet", "t5", "xlnet")
SIZES = {"bert": "base", "gpt2": "small", "vgg": "16", "resnet": "50", "t5": "small", "xlnet": "24"}
CLUSTERS = ("v100-a", "v100-c")
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16)
SAME = 1e-9
"""By which part a step may be longer: by rounding alone."""


class Planned(NamedTuple):
    """What a plan takes: seconds of a step, and the bytes of its fullest device."""

    step_s: float
    bytes: int


def planned(arguments: Sequence[str]) -> Planned | None:
    """The command line's plan; None: there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            code = plan_command.main([*arguments, "--json", str(out)])
        assert code in (0, 1), said.getvalue()
        told = json.loads(out.read_text())
    if not told["feasible"]:
        return None
    return Planned(told["step_s"], max(stage["peak_bytes"] for stage in told["stages"]))


def drawn(seed: int) -> str:
    """Draws a chain of unlike layers, as a graph.txt."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(12, 40))
    lines = []
    for node in range(layers):
        forward_ms, ratio = draw.lognormal(1.0, 0.6), draw.uniform(1.5, 2.5)
        lines.append(
            f"node{node} -- Layer{node} -- forward_compute_time={forward_ms:.4f}, "
            f"backward_compute_time={forward_ms * ratio:.4f}, "
            f"activation_size={draw.integers(1, 200) * 10**6}, "
            f"parameter_size={draw.integers(0, 50) * 10**6}"
        )
    return "\n".join([*lines, *(f"  node{i} -- node{i + 1}" for i in range(layers - 1))]) + "\n"


def profiles(folder: Path) -> Iterator[Path]:
    """Yields graph files: those of others, and drawn ones, which are written to a folder."""
    others = profiles_folder()
    yield from sorted([*others.glob("*.graph.txt"), *others.glob("*_training.json")])
    for seed in range(DRAWN):
        path = folder / f"drawn{seed}.graph.txt"
        path.write_text(drawn(seed))
        yield path


def limits(profile: Path, schedule: str) -> list[tuple[str, Planned | None]]:
    """A profile's plans under rising limits.

    Args:
        profile: a graph file.
        schedule: by its name.
    """
    asked = ["--graph", str(profile), "--schedule", schedule, "--hardware", "v100-b"]
    asked += ["--stages", str(STAGES), "--microbatches", str(2 * STAGES)]
    free = planned([*asked, "--memory-limit", "1TiB"])
    assert free is not None, "everything may be kept"
    shares = [(rung + 1) / RUNGS for rung in range(RUNGS)]
    rungs = [
        (f"{x:.1f}", planned([*asked, "--memory-limit", str(int(x * free.bytes))])) for x in shares
    ]
    return [*rungs, ("free", free)]


def devices(model: str, cluster: str) -> list[tuple[str, Planned | None]]:
    """A model's plans for rising numbers of devices.

    Args:
        model: by its name.
        cluster: by its name.
    """
    asked = ["--model", model, "--size", SIZES[model], "--hardware", cluster]
    return [(str(n), planned([*asked, "--devices", str(n)])) for n in DEVICES]


def slower(rungs: Sequence[tuple[str, Planned | None]]) -> tuple[float, str]:
    """By how much a plan is slower than the best of a rung below at most, and where.

    >>> slower([("1", Planned(2.0, 1)), ("2", Planned(1.0, 1)), ("3", Planned(1.5, 1))])
    (1.5, '3')
    """
    best_s, worst = np.inf, (1.0, "")
    for name, rung in rungs:
        step_s = rung.step_s if rung else np.inf
        if np.isfinite(best_s):
            worst = max(worst, (step_s / best_s, name))
        best_s = min(best_s, step_s)
    return float(worst[0]), worst[1]


def main(ladder: tyro.conf.Positional[Literal["limits", "devices"]]) -> int:
    """Prints a line per ladder; the exit code is 1 if a step is longer where more is allowed."""
    wrong = count = 0
    with tempfile.TemporaryDirectory() as folder:
        if ladder == "limits":
            names = [(str(p), s) for p in profiles(Path(folder)) for s in SCHEDULES]
        else:
            names = [(m, c) for m in MODELS for c in CLUSTERS]
        for a, b in names:
            rungs = limits(Path(a), b) if ladder == "limits" else devices(a, b)
            worst, where = slower(rungs)
            wrong, count = wrong + (worst > 1 + SAME), count + 1
            said = f"{worst:.4f} at {where}" if worst > 1 + SAME else "never slower"
            print(f"{Path(a).name} {b}: {said}", flush=True)
    print(f"{count} ladders, {wrong} with a plan that is slower where more is allowed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
