"""Examples per second on 1, 2 and 4 stages, really run: NPROC=1 python -m
experiments.scaling.measured

Unlike layers that sleep, so that cores are no matter, and BERT at size mini, whose work the cores
share. Each number of stages has a process of its own: the devices of one process lend each other
their workers.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jvpipe
from experiments.migration import naps
from experiments.schedules import layers
from experiments.schedules.clock import step_s
from jvpipe.models import load

STAGES, MICRO_BATCHES, STEPS = (1, 2, 4), 32, 5
LAYERS, LONGEST_S, WIDTH = 24, 2e-3, 16


def sleeping(stages: int, micro: int = MICRO_BATCHES, steps: int = STEPS) -> float:
    """Examples per second of layers whose forward sleeps a half to all of `LONGEST_S`, its backward
    twice that.
    """
    drawn = [float(x) for x in np.random.default_rng(0).uniform(LONGEST_S / 2, LONGEST_S, LAYERS)]
    pipe = _pipe(layers.loss_fn(tuple((x, x, x) for x in drawn)), optax.sgd(0.1), stages, micro)
    batch = naps.batch(2 * micro, WIDTH)
    state = pipe.init(naps.params(LAYERS, WIDTH), batch, None)
    return 2 * micro / step_s(pipe, state, batch, warm=1, steps=steps)


def bert(stages: int, micro: int = MICRO_BATCHES, steps: int = STEPS) -> float:
    """Examples per second of BERT at size mini."""
    workload = load("bert", "mini")
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), workload.abstract_batch(2 * micro))
    pipe = _pipe(workload.loss_fn, workload.optimizer(1000), stages, micro)
    state = pipe.init(workload.init, batch, jax.random.key(0))
    return 2 * micro / step_s(pipe, state, batch, warm=1, steps=steps)


def _pipe(loss_fn: Any, optimizer: Any, stages: int, micro: int) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        loss_fn,
        optimizer,
        stages=stages,
        microbatches=micro,
        devices=jax.devices()[:stages],
        group=False,
    )


SUBJECTS: Mapping[str, Callable[[int], float]] = {"layers that sleep": sleeping, "bert mini": bert}


def main() -> int:
    """The table, or one cell of it."""
    if len(sys.argv) == 3:
        stages = int(sys.argv[2])
        jax.config.update("jax_num_cpu_devices", stages)
        print(SUBJECTS[sys.argv[1]](stages), flush=True)
        return 0
    print(f"| | {' | '.join(map(str, STAGES))} |\n|---{'|---' * len(STAGES)}|", flush=True)
    for name in SUBJECTS:
        print(row(name, [alone(name, stages) for stages in STAGES]), flush=True)
    return 0


def alone(name: str, stages: int) -> float:
    """A cell by a process of its own."""
    command = [sys.executable, "-m", "experiments.scaling.measured", name, str(stages)]
    return float(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
    )


def row(name: str, rates: Sequence[float]) -> str:
    """A line of the table: rates, and the share of the first one's rate per device that is left."""
    shares = (rate / stages / rates[0] for rate, stages in zip(rates, STAGES, strict=True))
    return (
        f"| {name} | "
        f"{' | '.join(f'{rate:.1f} ({share:.0%})' for rate, share in zip(rates, shares, strict=True))} |"
    )


if __name__ == "__main__":
    sys.exit(main())
