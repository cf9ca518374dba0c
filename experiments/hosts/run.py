"""Times several processes on loopback against one with as many devices.

    python -m experiments.hosts.run [--rounds 3]

Each process of two has a core of its own. The ways are taken in turns, each in fresh processes.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from experiments.hosts.measure import MICROBATCHES, ROWS

LIMIT_S = 300
CORES = os.cpu_count() or 1


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measured(count: int, *arguments: str) -> Any:
    """What processes measure together; each of several has one core, one alone has them all."""
    port, started = free_port(), []
    for i in range(count):
        core = ["taskset", "--cpu-list", str(i % CORES)] if count > 1 else []
        command = [
            *core,
            sys.executable,
            "-m",
            "experiments.hosts.measure",
            str(i),
            str(count),
            str(port),
            *arguments,
        ]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | {"NPROC": "1"}
            )
        )
    try:
        told = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return json.loads(told[0])


def main() -> None:
    """Prints a row per number of processes and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    crossing_s = {int(size): s for size, s in measured(2, "crossing").items()}
    for size, seconds in crossing_s.items():
        print(f"crossing of {size:,} bytes: {1e3 * seconds:.2f} ms", flush=True)
    print(
        "| processes | width | one process, ms | its bound, ms | several, ms | over the slower | "
        "bits |"
    )
    print("|---|---|---|---|---|---|---|")
    for stages in (2, 3):
        for width in ROWS:
            one, several = [], []
            for _ in range(rounds):
                one.append(measured(1, str(stages), str(width)))
                several.append(measured(stages, str(stages), str(width)))
            alone_s, together_s = (
                statistics.median(x["step_s"] for x in taken) for taken in (one, several)
            )
            bound_s = alone_s * (MICROBATCHES + stages - 1) / MICROBATCHES
            bits = "equal" if len({x["loss"] for x in (*one, *several)}) == 1 else "DIFFER"
            print(
                f"| {stages} | {width} | {1e3 * alone_s:.1f} | {1e3 * bound_s:.1f} | "
                f"{1e3 * together_s:.1f} | {together_s / max(alone_s, bound_s):.2f} | {bits} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
