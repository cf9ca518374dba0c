"""Trains one model in one way at one micro-batch size, in a process of its own; prints one JSON object.

Usage: XLA_PYTHON_CLIENT_MEM_FRACTION=F python -m experiments.gpu_memory.case MODEL WAY SIZE [toy]

One stage holds the whole model and M = 4 micro-batches at once, as the first of four stages does under 1F1B.
"""

import json
import statistics
import sys
import time
from typing import Any

MICRO_BATCHES, STEPS = 4, 8
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("large", {"tokens": 512}),
    "gpt2": ("medium", {}),
}
TOY = {"blocks": 4, "width": 64, "heads": 4, "vocabulary": 1000, "tokens": 32}
TOY_LIMIT_BYTES = 12 * 2**20
SHARE = 0.95
"""Of what the device reports, jvpipe is asked to plan for so much: the allocator needs some for itself."""
FATES = {
    "keep": {"*": "keep"},
    "recompute": {
        "*": "recompute",
        "*:*": "keep",
    },  # each layer by itself, from its input, which is kept
    "swap": {"*": "swap"},
    "jvpipe": None,
}


def trained(model: str, way: str, size: int, toy: bool) -> dict[str, Any]:
    """Examples per second, the median of the steps after the second, and peaks: the ledger's, and the device's."""
    import jax
    import numpy as np

    import jvpipe
    from jvpipe.models import load

    device, examples = jax.devices()[0], size * MICRO_BATCHES
    name, options = ("mini", TOY) if toy else WORKLOADS[model]
    workload = load(model, name, **options)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), workload.abstract_batch(examples))
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        workload.optimizer(1000),
        stages=1,
        microbatches=MICRO_BATCHES,
        schedule="gpipe",
        planner="jvpipe" if way == "jvpipe" else "even",
        memory_limit=limit_bytes(device.memory_stats(), way),
        fates=FATES[way],
        devices=[device],
    )
    state, taken = pipe.init(workload.init, batch, jax.random.key(0)), []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)
        taken.append(time.perf_counter() - start_s)
    return {
        "examples_per_s": examples / statistics.median(taken[2:]),
        "ledger_bytes": pipe.ledger.peak_bytes[device],
        "host_bytes": pipe.ledger.host_peak_bytes,
        "device_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "device": device.device_kind,
    }


def limit_bytes(stats: dict[str, int] | None, way: str) -> int:
    """What the pipeline is told: of a device that reports its memory nothing is refused but what it cannot hold."""
    if stats is None:
        return TOY_LIMIT_BYTES
    return int(SHARE * stats["bytes_limit"]) if way == "jvpipe" else 2**50


def main() -> None:
    """One case; `{"fits": false}` if it needs more memory than there is."""
    import jax

    import jvpipe

    model, way, size, *rest = sys.argv[1:]
    try:
        found = trained(model, way, int(size), toy=rest == ["toy"])
    except jvpipe.MemoryLimitExceeded:
        found = None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = None
    print(json.dumps({"fits": found is not None, **(found or {})}))


if __name__ == "__main__":
    main()
