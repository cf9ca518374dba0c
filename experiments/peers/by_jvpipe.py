"""jvpipe under one of its schedules, a device per stage; it cuts where it will.

Usage: NPROC=1 python -m experiments.peers.by_jvpipe SCHEDULE REFERENCE [--stages 1]
"""

import json
from typing import Any

import jax
import numpy as np
import optax

import jvpipe
from experiments.peers import work
from experiments.throughput.data import MICRO_BATCHES, Sizes, transformer_batch, transformer_params
from experiments.throughput.model import transformer_loss
from jvpipe.schedules import SCHEDULES

RATE = (
    128.0  # a power of two, so large that a step's difference of parameters has the gradient's bits
)


def pipeline(schedule: str, plan: int | jvpipe.Plan, rate: float) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        transformer_loss, optax.sgd(rate), plan, MICRO_BATCHES, schedule, group=True
    )


def ready(schedule: str, stages: int, sizes: Sizes) -> tuple[work.Ready, list[int]]:
    """A pipeline, and where it is cut; the gradients are those of another one with the same
    plan.
    """
    params, batch = transformer_params(sizes), transformer_batch(sizes)
    checked = pipeline(schedule, stages, RATE)
    state, metrics = checked.step(checked.init(params, batch, None), batch)
    before, after = work.named(params), work.named(checked.params(state))
    gradients = {name: (value - after[name]) / np.float32(RATE) for name, value in before.items()}
    timed = pipeline(schedule, checked.plan, 0.1)
    state: Any = timed.init(params, batch, None)

    def step() -> None:
        nonlocal state
        state, _ = timed.step(state, batch)
        jax.block_until_ready(state)

    return work.Ready(step, float(metrics["loss"]), gradients), list(timed.plan.cuts)


def main() -> None:
    options = work.options(__doc__, tuple(SCHEDULES))
    jax.config.update("jax_num_cpu_devices", options.stages)
    made, cuts = ready(options.way, options.stages, options.sizes)
    print(
        json.dumps(work.told(made, options) | {"version": f"JAX {jax.__version__}", "cuts": cuts})
    )


if __name__ == "__main__":
    main()
