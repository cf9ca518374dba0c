"""The largest batch under a limit and examples per second, really run: NPROC=1 python -m
experiments.max_batch.run

A small BERT on two CPU devices. A batch counts if a plan is found, it runs and the ledger's peak
keeps the limit.
"""

import itertools
import statistics
import sys
import time
from functools import cache

from experiments.max_batch.largest import largest

STAGES, MICRO_BATCHES, LIMIT_BYTES = 2, 4, 8 * 2**20
PLANNERS = ("gpipe", "pipedream", "vpipe", "dawnpiper", "jvpipe")
SCHEDULES = ("gpipe", "1f1b", "pipedream", "2bw")
STEPS = 16


def main() -> None:
    """Every planner under every schedule that can be run, or under those that are named."""
    import jax

    jax.config.update("jax_num_cpu_devices", STAGES)
    for schedule in sys.argv[1:] or SCHEDULES:
        most: dict[str, int] = {}
        for planner in PLANNERS:
            most[planner] = largest_micro_batch(planner, schedule, max(most.values(), default=8))
            print(
                f"{schedule}, {planner}: {most[planner]} examples per micro-batch",
                file=sys.stderr,
                flush=True,
            )
        equal = min(size for size in most.values() if size)
        for title, sizes in (
            (f"at an equal batch of {equal * MICRO_BATCHES}", dict.fromkeys(PLANNERS, equal)),
            ("at each one's largest batch", most),
        ):
            print(
                f"\n### {schedule}, {title}\n\n| planner | batch | examples/s | peak MiB "
                "|\n|---|---|---|---|"
            )
            for planner, size in sizes.items():
                found = measured(planner, schedule, size) if most[planner] else None
                shown = (
                    f"{size * MICRO_BATCHES} | {found[0]:.0f} | {found[1] / 2**20:.2f}"
                    if found
                    else "none fits | |"
                )
                print(f"| {planner} | {shown} |", flush=True)


def largest_micro_batch(planner: str, schedule: str, near: int) -> int:
    """The largest micro-batch that keeps the limit, sought from `near` on."""
    return largest(lambda size: keeps_limit(planner, schedule, size), near, bits=4)


def keeps_limit(planner: str, schedule: str, size: int) -> bool:
    """Whether steps at a micro-batch size are seen to keep the limit."""
    found = measured(planner, schedule, size)
    return found is not None and found[1] <= LIMIT_BYTES


@cache
def measured(planner: str, schedule: str, size: int) -> tuple[float, int] | None:
    """Examples per second, the median of the steps after the first, and the ledger's peak of the
    fullest device.

    None if the planner finds nothing that keeps the limit.
    """
    import jax
    import numpy as np

    import jvpipe
    from jvpipe.models import load
    from jvpipe.schedules import find_schedule

    workload = load("bert", "mini", blocks=4, width=64, heads=4, vocabulary=1000, tokens=32)
    examples = size * MICRO_BATCHES
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), workload.abstract_batch(examples))
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        workload.optimizer(1000, local=not find_schedule(schedule).synchronous),
        stages=STAGES,
        microbatches=MICRO_BATCHES,
        schedule=schedule,
        planner=planner,
        memory_limit=LIMIT_BYTES,
    )
    try:
        state, taken = pipe.init(workload.init, batch, jax.random.key(0)), []
    except jvpipe.MemoryLimitExceeded:
        return None
    start_s = time.perf_counter()
    for reached, _ in pipe.run(state, itertools.repeat(batch), num_steps=STEPS):
        jax.block_until_ready(reached)
        taken.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
    return examples / statistics.median(taken[1:]), max(pipe.ledger.peak_bytes.values())


if __name__ == "__main__":
    main()
