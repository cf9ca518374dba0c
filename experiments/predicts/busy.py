"""Steps of devices that share cores, over what is predicted: NPROC=1 python -m
experiments.predicts.busy [MODEL ...]

Each workload at its size mini on two stages, 8 micro-batches of 2 examples, all else as a user has
it who says no more. Seconds are those of a quiet machine: `others` is the share of the cores that
other processes had meanwhile.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

import jvpipe
from experiments.schedules.clock import step_s
from jvpipe.models import NAMES, load

LIKE_OTHERS = ("qwen3", "gemma", "evolved-amoebanet")
"""Workloads whose layers are those of llama or of amoebanet."""
MODELS = tuple(name for name in NAMES if name not in LIKE_OTHERS)
SCHEDULES = ("1f1b", "zb-h1", "auto")
STAGES, MICROBATCHES, EXAMPLES = 2, 8, 2
WARM, STEPS = 2, 15
MEDIAN, WORST = (0.9, 1.1), 1.2


class Measured(NamedTuple):
    """Seconds of a step, predicted and measured, and the share of the cores that other processes
    had meanwhile.
    """

    predicted_s: float
    taken_s: float
    others: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.taken_s / self.predicted_s


def measured(model: str, schedule: str) -> Measured:
    """Measures a step.

    Args:
        model: a workload, of size mini.
        schedule: by its name.
    """
    workload = load(model)
    batch = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype), workload.abstract_batch(MICROBATCHES * EXAMPLES)
    )
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        workload.optimizer(1000),
        stages=STAGES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        devices=jax.devices()[:STAGES],
        has_aux=workload.has_aux,
        has_state=workload.has_state,
        group=False,
    )
    state = pipe.init(workload.init, batch, jax.random.key(0), workload.initial_state())
    assert pipe.session.compiled_plans.planned is not None, "a planner was asked"
    before = _used_s()
    taken_s = step_s(pipe, state, batch, warm=WARM, steps=STEPS)
    there_s, all_s, own_s = (b - a for a, b in zip(before, _used_s(), strict=True))
    return Measured(
        pipe.session.compiled_plans.planned.step_s, taken_s, max(all_s - own_s, 0.0) / there_s
    )


def _used_s() -> tuple[float, float, float]:
    """The seconds that all cores had, those in which they were used, and those of this process."""
    with open("/proc/stat") as stat:
        numbers = list(map(int, stat.readline().split()[1:9]))
    ticks = os.sysconf("SC_CLK_TCK")
    there = sum(numbers)
    idle = numbers[3] + numbers[4]
    return there / ticks, (there - idle) / ticks, time.process_time()


def rows(models: Sequence[str]) -> Iterator[str]:
    """Yields a row for each workload, and last how far off they are.

    Args:
        models: the workloads.
    """
    yield f"| model | {' | '.join(SCHEDULES)} | others |\n|---{'|---' * (len(SCHEDULES) + 1)}|"
    found = list[Measured]()
    for model in models:
        of_model = [measured(model, schedule) for schedule in SCHEDULES]
        found += of_model
        cells = [
            f"{1e3 * x.taken_s:.1f} / {1e3 * x.predicted_s:.1f} = {x.ratio:.2f}" for x in of_model
        ]
        yield f"| {model} | {' | '.join(cells)} | {max(x.others for x in of_model):.0%} |"
    median = statistics.median(x.ratio for x in found)
    worst = max((x.ratio for x in found), key=lambda ratio: max(ratio, 1 / ratio))
    yield (
        f"\nmedian {median:.3f} (bound: {MEDIAN[0]} to {MEDIAN[1]}), worst {worst:.2f} (bound: "
        f"{WORST})"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", STAGES)
    for line in rows(sys.argv[1:] or MODELS):
        print(line, flush=True)
