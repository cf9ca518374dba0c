"""Seconds of a step, and of the start before it, with layers apart, in groups and otherwise: in
turns, a process each.

    NPROC=1 python -m experiments.groups.steps [--rounds 3] [--models tiny chain transformer ...] [--stages 1 2]
        [--ways jit apart "in groups" ...] [--planner even] [--starts 2] [--steps 10]

A start is from the import of JAX to the end of the first step: the first one with an empty
compilation cache, the second with what the first has compiled. Steps are compared with those of the
first row of a model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

MODELS = ["chain", "tiny", "small", "transformer", "linen", "llama", "gpt2", "bert"]


@dataclass(frozen=True)
class Way:
    """A way to run the same steps.

    Attributes:
        plain: no pipeline runs them, but a jit per micro-batch on one device.
        group: layers run in groups; None as a user has it who does not say, once that pays.
        waits: the dispatching thread runs each program itself, so that no other has to wake.
        whole: a step is one micro-batch, so that no gradients are summed over several.
        kept: memory that is freed is kept for the next buffer, as a pipeline has it.
    """

    plain: bool = False
    group: bool | None = False
    waits: bool = False
    whole: bool = False
    kept: bool = True


WAYS = {
    "jit": Way(plain=True, kept=False),
    "jit, memory kept": Way(plain=True),
    "apart": Way(),
    "apart, memory given back": Way(kept=False),
    "in groups": Way(group=True),
    "left out": Way(group=None),
    "on one thread": Way(waits=True),
    "in groups on one thread": Way(group=True, waits=True),
    "one micro-batch": Way(whole=True),
}
BOTH = ("apart", "in groups")


@dataclass(frozen=True)
class Cell:
    """What a process of its own measures."""

    model: str
    stages: int
    way: str
    planner: str = "even"


def one(cell: Cell, cache: str, steps: int) -> dict[str, float]:
    """A start and some steps, in this process."""
    start_s = time.perf_counter()
    import jax

    way = WAYS[cell.way]
    jax.config.update("jax_num_cpu_devices", cell.stages)
    jax.config.update("jax_cpu_enable_async_dispatch", not way.waits)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from experiments.groups.works import WORKS
    from jvpipe.runtime.engine.freed_memory import keep_freed_memory

    if not way.kept:
        os.environ["GLIBC_TUNABLES"] = ""  # whoever says something there is told nothing
    keep_freed_memory()
    work = WORKS[cell.model]()
    step, peak_bytes = by_jit(work) if way.plain else by_pipeline(work, cell)
    jax.block_until_ready(step())
    found = {"start_s": time.perf_counter() - start_s}
    taken_s, host_s = [], []
    for _ in range(steps):
        began_s = time.perf_counter()
        state = step()
        host_s.append(time.perf_counter() - began_s)
        jax.block_until_ready(state)
        taken_s.append(time.perf_counter() - began_s)
    times = {"step_s": statistics.median(taken_s), "host_s": statistics.median(host_s)}
    return found | times | {"peak_mb": peak_bytes() / 1e6}


Ready = tuple[Callable[[], Any], Callable[[], int]]
"""Takes a step and returns the new state; returns the peak of bytes that a ledger has counted."""


def by_pipeline(work: Any, cell: Cell) -> Ready:
    """Steps of a pipeline."""
    import jax
    import optax

    import jvpipe
    from experiments.throughput.data import MICRO_BATCHES

    way = WAYS[cell.way]
    pipe = jvpipe.Pipeline(
        work.loss,
        optax.adamw(1e-3),
        cell.stages,
        1 if way.whole else MICRO_BATCHES,
        planner=cell.planner,
        group=way.group,
    )
    state = pipe.init(work.params, work.batch, jax.random.key(0))

    def step() -> Any:
        nonlocal state
        state, _ = pipe.step(state, work.batch)
        return state

    return step, lambda: max(pipe.ledger.peak_bytes.values())


def by_jit(work: Any) -> Ready:
    """Steps of plain JAX: a jit of a micro-batch's gradients, one that adds them up, one of the
    update.
    """
    import jax
    import optax

    from experiments.throughput.data import MICRO_BATCHES
    from jvpipe import Weighted

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        found = work.loss(params, batch, key)
        return found.total / found.weight if isinstance(found, Weighted) else found

    def updated(state: Any, sums: Any) -> Any:
        params, moments = state
        means = jax.tree.map(lambda x: x / MICRO_BATCHES, sums)
        changes, moments = optimizer.update(means, moments, params)
        return optax.apply_updates(params, changes), moments

    optimizer, key = optax.adamw(1e-3), jax.random.key(0)
    parts = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), work.batch)
    parts = [jax.tree.map(lambda x, m=m: x[m], parts) for m in range(MICRO_BATCHES)]
    params = jax.jit(work.params)(key) if callable(work.params) else jax.device_put(work.params)
    state = params, optimizer.init(params)
    grad = jax.jit(jax.grad(loss))
    add = jax.jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b), donate_argnums=0)
    update = jax.jit(updated, donate_argnums=0)

    def step() -> Any:
        nonlocal state
        sums = grad(state[0], parts[0], key)
        for part in parts[1:]:
            sums = add(sums, grad(state[0], part, key))
        state = update(state, sums)
        return state

    return step, lambda: 0


def alone(cell: Cell, cache: str, steps: int) -> dict[str, float]:
    """The same in a process of its own."""
    told = [cell.model, str(cell.stages), cell.way, cell.planner, cache, str(steps)]
    command = [sys.executable, "-m", "experiments.groups.steps", "--one", *told]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def started(cell: Cell, starts: int, steps: int) -> list[dict[str, float]]:
    """A start with an empty compilation cache, and others with what it has compiled."""
    with tempfile.TemporaryDirectory() as cache:
        return [alone(cell, cache, steps) for _ in range(starts)]


def shown(cell: Cell, rounds: Sequence[Sequence[dict[str, float]]], over_s: float) -> str:
    """A row of the table: medians, the step's also over another's."""

    def median(what: str, runs: Sequence[dict[str, float]]) -> float:
        return statistics.median(run[what] for run in runs)

    every, step_s = [run for runs in rounds for run in runs], step_of(rounds)
    later = [run for runs in rounds for run in runs[1:]]
    numbers = [
        f"{median('start_s', [runs[0] for runs in rounds]):.1f}",
        f"{median('start_s', later):.1f}" if later else "-",
        f"{1e3 * step_s:.1f} | {step_s / over_s:.2f}",
        f"{1e3 * median('host_s', every):.1f} | {median('peak_mb', every):.1f}",
    ]
    return f"| {cell.model} | {cell.stages} | {cell.way} | {' | '.join(numbers)} |"


def step_of(rounds: Sequence[Sequence[dict[str, float]]]) -> float:
    """The median step of all runs, in seconds."""
    return statistics.median(run["step_s"] for runs in rounds for run in runs)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=BOTH)
    parser.add_argument("--planner", default="even")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one:
        model, stages, way, planner, cache, steps = told.one
        print(json.dumps(one(Cell(model, int(stages), way, planner), cache, int(steps))))
        return
    print(
        "| model | stages | layers | first start, s | second, s | step, ms | over the first | "
        "host, ms | peak, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in told.models:
        cells = [
            Cell(model, stages, way, told.planner)
            for stages, way in product(told.stages, told.ways)
            if stages == 1 or not WAYS[way].plain
        ]
        found: dict[Cell, list[list[dict[str, float]]]] = {cell: [] for cell in cells}
        for _ in range(told.rounds):
            for cell in cells:
                found[cell].append(started(cell, told.starts, told.steps))
                print(cell, found[cell][-1], file=sys.stderr, flush=True)
        over_s = step_of(found[cells[0]])
        for cell, rounds in found.items():
            print(shown(cell, rounds, over_s), flush=True)


if __name__ == "__main__":
    main()
