"""Runs every measurement in a process of its own and prints the table. Usage.

python -m experiments.throughput.run
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

WAYS = [
    ("jit", 1),
    ("scan", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("gpipe", 2),
    ("1f1b", 2),
    ("replicas", 2),
    ("2:1", 3),
]
NAMES = {
    ("jit", 1): "jit(value_and_grad) per micro-batch",
    ("scan", 1): "jit of a scan over micro-batches",
    ("gpipe", 1): "jvpipe, one stage, gpipe",
    ("1f1b", 1): "jvpipe, one stage, 1f1b",
    ("gpipe", 2): "jvpipe, two stages, gpipe",
    ("1f1b", 2): "jvpipe, two stages, 1f1b",
    ("replicas", 2): "jvpipe, one stage, two replicas",
    ("2:1", 3): "jvpipe, two stages, 2:1 (three devices on two cores)",
}


def measured(way: str, devices: int) -> dict[str, Any]:
    """One measurement, each device on a core of its own."""
    command = [sys.executable, "-m", "experiments.throughput.measure", way, str(devices)]
    out = subprocess.run(
        command, env=os.environ | {"NPROC": "1"}, capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout.splitlines()[-1])


def start(cache: str) -> dict[str, Any]:
    """One start of BERT-48 with a folder of compiled programs."""
    command = [sys.executable, "-m", "experiments.throughput.start", cache]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def main() -> None:
    """Takes turns between the ways, so that a slow minute of the machine hits all, and prints
    medians and ratios.
    """
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    tiny = measured("dispatch", 4)
    task, slope, jit = tiny["task_us"], tiny["slope_us"], tiny["jit_us"]
    print(
        f"dispatch: {task:.1f} us per task, {slope:.2f} us per further array; a jit call of 20 "
        f"arrays {jit:.1f} us"
    )
    print(
        f"in jit calls: {task / jit:.2f} per task (bound 1.80), {slope / jit:.3f} per array "
        "(bound 0.080)\n"
    )
    found = []
    for _ in range(rounds):
        found.append({way: measured(*way) for way in WAYS})
        print({NAMES[way]: round(each["step_s"], 3) for way, each in found[-1].items()}, flush=True)
    step_s = {way: statistics.median(each[way]["step_s"] for each in found) for way in WAYS}
    busy_s = {
        way: statistics.median(each[way].get("busy_s", 0.0) for each in found) for way in WAYS
    }
    print(
        "\n| way | s per step | over jit | processor s per step | first step, s | programs "
        "|\n|---|---|---|---|---|---|"
    )
    for way in WAYS:
        last = found[-1][way]
        first, programs = last.get("first_s"), last.get("programs", 1)
        shown = f"{first:.1f}" if first else "-"
        over, busy = step_s[way] / step_s["jit", 1], f"{busy_s[way]:.2f}" if busy_s[way] else "-"
        print(f"| {NAMES[way]} | {step_s[way]:.3f} | {over:.2f} | {busy} | {shown} | {programs} |")
    print(
        f"\ntwo stages under 1f1b over one stage: {step_s['1f1b', 1] / step_s['1f1b', 2]:.2f} "
        "times as fast"
    )
    print(
        f"two replicas over one device: {step_s['1f1b', 1] / step_s['replicas', 2]:.2f} times as "
        "fast"
    )
    print(f"processor seconds of 2:1 over those of 1:1: {busy_s['2:1', 3] / busy_s['1f1b', 2]:.2f}")
    with tempfile.TemporaryDirectory() as cache:
        starts = [start(cache) for _ in range(2)]
    print("start of BERT-48 on 4 stages: first {start_s:.1f} s".format(**starts[0]), end=", ")
    print(
        f"second {starts[1]['start_s']:.1f} s, {starts[0]['start_s'] / starts[1]['start_s']:.2f} "
        "times as fast"
    )


if __name__ == "__main__":
    main()
