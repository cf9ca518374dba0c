"""The largest batch on one GPU under a limit: python -m experiments.gpu_memory.run [bert | gpt2] [FRACTION] [toy]

Every trial is a process of its own, to which XLA gives FRACTION (0.25) of the GPU's memory and no more. With `toy` the
models are small and the limit is the pipeline's own, for CPUs, which have none to enforce.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

from experiments.max_batch.largest import largest

MODELS = ("bert", "gpt2")
WAYS = ("keep", "recompute", "swap", "jvpipe")


def main() -> None:
    """Searches the largest micro-batch of each way, then prints what was measured there and at an equal batch."""
    toy = "toy" in sys.argv[1:]
    models = [model for model in MODELS if model in sys.argv[1:]] or MODELS
    fraction = next((word for word in sys.argv[1:] if word not in ("toy", *MODELS)), "0.25")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction,
            "JAX_COMPILATION_CACHE_DIR": folder,
        }

        @cache
        def case(model: str, way: str, size: int) -> dict[str, Any]:
            command = [
                sys.executable,
                "-m",
                "experiments.gpu_memory.case",
                model,
                way,
                str(size),
                *["toy"] * toy,
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
            return json.loads(done.stdout.splitlines()[-1])

        for model in models:
            most: dict[str, int] = {}
            for way in WAYS:
                near = max(most.values(), default=8)
                most[way] = largest(
                    lambda size, m=model, w=way: case(m, w, size)["fits"],
                    near,
                    bits=2 if toy else 4,
                )
            equal = min(most.values())
            for title, sizes in (
                ("an equal batch", dict.fromkeys(WAYS, equal)),
                ("each one's largest batch", most),
            ):
                print(f"\n## {model}, at {title}\n")
                print(
                    "| way | micro-batch | examples/s | ledger MiB | device MiB | ledger over device | host MiB |"
                )
                print("|---|---|---|---|---|---|---|")
                for way, size in sizes.items():
                    print(row(way, size, case(model, way, size) if size else {}), flush=True)


def row(way: str, size: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    if not found:
        return f"| {way} | none fits | | | | | |"
    ledger, device = found["ledger_bytes"], found["device_bytes"]
    shown = [
        way,
        size,
        f"{found['examples_per_s']:.1f}",
        mib(ledger),
        mib(device) if device else "not reported",
    ]
    ratio = f"{ledger / device:.3f}" if device else ""
    return f"| {' | '.join(map(str, shown))} | {ratio} | {mib(found['host_bytes'])} |"


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
