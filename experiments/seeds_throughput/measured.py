"""The comparison really run, while devices sleep: NPROC=1 python -m
experiments.seeds_throughput.measured [STEPS]

Four CPU devices pass micro-batches through layers that sleep for times of their own, so that cores
are no matter. PipeDream and GPipe run their own planners' plans; jvpipe's must keep the bytes of
the fullest device of theirs.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
import optax

import jvpipe
from experiments.migration import naps
from experiments.schedules import layers
from experiments.seeds_throughput.run import SYSTEMS

DEVICES, MICRO, WIDTH, EXAMPLES, MOST_S = 4, 8, 16, 64, 6e-3
"""How many devices, micro-batches, features, examples of a micro-batch; the longest forward."""


def seconds(count: int) -> tuple[layers.Seconds, ...]:
    """Of unlike layers: a forward from a third of `MOST_S` on, the halves of a backward as long
    each.
    """
    drawn = np.random.default_rng(0).uniform(MOST_S / 3, MOST_S, count)
    return tuple((float(x), float(x), float(x)) for x in drawn)


def measured(
    schedule: str, planner: str, limit: int | None, steps: int, chain: int
) -> tuple[float, int]:
    """Examples per second, the median of steps that are warm, and the bytes of the fullest
    device.
    """
    pipe = jvpipe.Pipeline(
        layers.loss_fn(seconds(chain)),
        optax.sgd(0.1),
        stages=DEVICES,
        microbatches=MICRO,
        schedule=schedule,
        planner=planner,
        memory_limit=limit,
        devices=jax.devices()[:DEVICES],
        group=False,
    )
    batch = naps.batch(EXAMPLES * MICRO, WIDTH)
    state, taken, start_s = (
        pipe.init(naps.params(chain, WIDTH), batch, None),
        list[float](),
        time.perf_counter(),
    )
    for _, metrics in pipe.run(state, itertools.repeat(batch), num_steps=steps):
        jax.block_until_ready(metrics["loss"])
        taken.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
    return EXAMPLES * MICRO / statistics.median(taken[2:]), max(pipe.ledger.peak_bytes.values())


def table(steps: int = 12, chain: int = 16) -> Iterator[str]:
    """Yields the table's lines."""
    yield "| | own planner, examples/s | KiB | with jvpipe in as many | KiB | |"
    yield "|---|---|---|---|---|---|"
    for system in SYSTEMS:
        own, held = measured(system.schedule, system.planner, None, steps, chain)
        ours, kept = measured(system.schedule, "jvpipe", held, steps, chain)
        cells = (
            f"{own:.0f} | {held / 1024:.1f} | {ours:.0f} | {kept / 1024:.1f} | "
            f"{ours / own - 1:+.0%}"
        )
        yield f"| {system.name} | {cells} |"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for line in table(*map(int, sys.argv[1:2])):
        print(line, flush=True)


if __name__ == "__main__":
    main()
