"""BERT mini at the smallest limit that the planner names, really run.

    python -m experiments.max_batch.smallest

Prints what the default holds, what the run at five limits from there down holds, and whether the
losses are the same to the bit.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jvpipe
from jvpipe.models.workload import Workload, load

BATCH, MICRO, STAGES, STEPS, LIMITS = 256, 4, 2, 2, 5


def run(workload: Workload, batches: list[Any], limit_bytes: int | None) -> tuple[int, list[float]]:
    """The most bytes held by a device, and the losses."""
    optimizer = workload.optimizer(workload.steps)
    pipe = jvpipe.Pipeline(workload.loss_fn, optimizer, STAGES, MICRO, memory_limit=limit_bytes)
    state = pipe.init(workload.init, batches[0], jax.random.key(0))
    losses = []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    jax.block_until_ready(state)
    return max(pipe.ledger.peak_bytes.values()), losses


def main() -> None:
    """A row for each limit."""
    jax.config.update("jax_num_cpu_devices", STAGES)
    workload = load("bert", "mini")
    with tempfile.TemporaryDirectory() as folder:
        batches = list(islice(workload.open_data(None, Path(folder), 0, BATCH).train, STEPS))
    default, expected = run(workload, batches, None)
    print("| limit MiB | held MiB | held / default | losses |\n|---|---|---|---|")
    print(f"| none | {default / 2**20:.1f} | 1.000 | |", flush=True)
    try:
        run(workload, batches, 1)
        raise AssertionError("a byte is enough")
    except jvpipe.MemoryLimitExceeded as error:
        smallest = error.smallest_limit_bytes
    for limit in np.linspace(default, smallest, LIMITS).astype(int).tolist():
        held, losses = run(workload, batches, limit)
        same = "the same bits" if losses == expected else "NOT the same"
        print(
            f"| {limit / 2**20:.1f} | {held / 2**20:.1f} | {held / default:.3f} | {same} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
