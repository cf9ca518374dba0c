"""Seconds of a step, and of the start before it, with layers apart, in groups and otherwise: in turns, a process each.

    NPROC=1 python -m experiments.groups.steps [--rounds 3] [--models tiny chain transformer ...] [--stages 1 2]
        [--ways apart "in groups" ...]

A start is from the import of JAX to the end of the first step: the first one with an empty compilation cache, the
second with what the first has compiled.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

SIZES = {
    "chain": None,  # layers of a 4 x 4 product: nothing but dispatch
    "tiny": (16, 8, 32, 2),
    "small": (64, 32, 500, 8),
    "transformer": (256, 128, 2000, 8),
    "few words": (256, 128, 32, 8),  # what is less than for the transformer is the loss's
}
"""Width, tokens, vocabulary and blocks of a transformer."""


@dataclass(frozen=True)
class Way:
    """A way to run the same steps.

    Attributes:
        group: layers run in groups.
        waits: the dispatching thread runs each program itself, so that no other has to wake.
        whole: a step is one micro-batch, so that no gradients are summed over several.
    """

    group: bool = False
    waits: bool = False
    whole: bool = False


WAYS = {
    "apart": Way(),
    "in groups": Way(group=True),
    "on one thread": Way(waits=True),
    "in groups on one thread": Way(group=True, waits=True),
    "one micro-batch": Way(whole=True),
}
BOTH = ("apart", "in groups")


@dataclass(frozen=True)
class Work:
    """A loss, and what a step of it takes."""

    loss: Any
    params: Any
    batch: Any
    microbatches: int


def work_of(name: str) -> Work:
    """Returns the work of a name among the sizes."""
    import numpy as np

    from experiments.throughput.data import (
        MICRO_BATCHES,
        Sizes,
        transformer_batch,
        transformer_params,
    )
    from experiments.throughput.model import chain_loss, chain_params, transformer_loss

    if (sizes := SIZES[name]) is None:
        batch = {k: np.ones((MICRO_BATCHES, 4), np.float32) for k in "xy"}
        return Work(chain_loss, chain_params(4, layers=32), batch, MICRO_BATCHES)
    params, batch = transformer_params(Sizes(*sizes)), transformer_batch(Sizes(*sizes))
    return Work(transformer_loss, params, batch, MICRO_BATCHES)


def one(name: str, stages: int, cache: str, way: Way, steps: int = 10) -> dict[str, float]:
    """A start and some steps, in this process."""
    start_s = time.perf_counter()
    import jax
    import optax

    jax.config.update("jax_num_cpu_devices", stages)
    jax.config.update("jax_cpu_enable_async_dispatch", not way.waits)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import jvpipe
    from experiments.schedules.clock import timed

    work = work_of(name)
    microbatches = 1 if way.whole else work.microbatches
    pipe = jvpipe.Pipeline(
        work.loss, optax.adamw(1e-3), stages, microbatches, planner="even", group=way.group
    )
    state = pipe.init(work.params, work.batch, jax.random.key(0))
    state, _ = pipe.step(state, work.batch)
    jax.block_until_ready(state)
    found = {"start_s": time.perf_counter() - start_s}
    taken_s, host_s = timed(pipe, state, work.batch, steps)
    peak_bytes = max(pipe.ledger.peak_bytes.values())
    return found | {
        "step_s": statistics.median(taken_s),
        "host_s": statistics.median(host_s),
        "peak_mb": peak_bytes / 1e6,
    }


def apart(name: str, stages: int, cache: str, way: str) -> dict[str, float]:
    """The same in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "experiments.groups.steps",
        "--one",
        name,
        str(stages),
        cache,
        way,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=BOTH)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one:
        name, stages, cache, way = told.one
        print(json.dumps(one(name, int(stages), cache, WAYS[way])))
        return
    print(
        "| model | stages | layers | first start, s | second, s | step, ms | host, ms | peak, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in told.models:
        for stages in told.stages:
            found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in told.ways}
            for _ in range(told.rounds):
                for way in told.ways:
                    with tempfile.TemporaryDirectory() as cache:
                        found[way].append([apart(name, stages, cache, way) for _ in range(2)])
            for way, rounds in found.items():
                firsts, seconds = zip(*rounds, strict=True)

                def median(runs: Any, what: str) -> float:
                    return statistics.median(run[what] for run in runs)

                starts = f"{median(firsts, 'start_s'):.1f} | {median(seconds, 'start_s'):.1f}"
                both = [*firsts, *seconds]
                steps = " | ".join(
                    f"{1e3 * median(both, what):.1f}" for what in ("step_s", "host_s")
                )
                peak = f"{median(both, 'peak_mb'):.1f}"
                print(f"| {name} | {stages} | {way} | {starts} | {steps} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
