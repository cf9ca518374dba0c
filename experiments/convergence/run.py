"""Held-out loss against examples and against seconds.

python -m experiments.convergence.run [WAY ...].
"""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import optax

import jvpipe
from jvpipe.models import Data, Workload, load
from jvpipe.schedules import PipeMare, Schedule, find_schedule

MICROBATCHES, BATCH, LOOKS = 4, 32, 8
RATES = (
    2e-3,
    1e-3,
)  # of an update per batch, and of one per micro-batch: smaller by the root of their ratio


@dataclass(frozen=True)
class Way:
    """A schedule; if it `moves`, a layer moves to the other device half way, while training
    runs.
    """

    schedule: str
    moves: bool = False


WAYS: Mapping[str, Way] = {
    "gpipe": Way("gpipe"),
    "1f1b": Way("1f1b"),
    "1f1b, a layer moves": Way("1f1b", moves=True),
    "2bw": Way("2bw"),
    "pipedream": Way("pipedream"),
    "pipedream, a layer moves": Way("pipedream", moves=True),
    "pipemare": Way("pipemare"),
    "xpipe": Way("xpipe"),
}


@dataclass(frozen=True)
class Curve:
    """Held-out loss after so many examples, and the seconds that their training took."""

    examples: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    updates: int

    def row(self, name: str) -> str:
        """The line of the table."""
        told = [f"{loss:.3f}" for loss in self.losses[2::2]]
        return f"| {name} | {self.updates} | {' | '.join(told)} | {self.seconds[-1]:.0f} |"


def train(way: Way, workload: Workload, data: Data, steps: int) -> Curve:
    """Trains on two devices, and looks at the held-out loss of the newest weights `LOOKS` times."""
    schedule, updates = _schedule(way.schedule, steps)
    rate = RATES[updates > steps]
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        optax.adamw(
            optax.linear_schedule(0.0, rate, max(1, updates // 20)), b2=0.98, weight_decay=0.01
        ),
        stages=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        planner="even",
        devices=jax.devices()[:2],
    )
    state = pipe.init(workload.init, data.example, jax.random.key(0))
    examples, losses, seconds, taken_s = [0], [_loss(pipe, state, data)], [0.0], 0.0
    if way.moves:
        first, second = (len(stage.layers) for stage in pipe.plan.stages)
        state = pipe.migrate(
            state, jvpipe.Plan.from_cuts([first + 1, second - 1]), at=(steps // 2, 0)
        )
    start_s = time.perf_counter()
    stream = pipe.run(state, data.train, num_steps=steps)
    for state, _ in stream:
        if state.step % max(1, steps // LOOKS) == 0:
            state = pipe.drain(state) if state.step == steps else state
            jax.block_until_ready(state)
            taken_s += time.perf_counter() - start_s
            examples, seconds = [*examples, state.step * BATCH], [*seconds, taken_s]
            losses.append(_loss(pipe, state, data))
            start_s = time.perf_counter()
    return Curve(tuple(examples), tuple(losses), tuple(seconds), updates)


def _schedule(name: str, steps: int) -> tuple[Schedule, int]:
    """A schedule, and the updates of so many steps under it; PipeMare's T1 ends after a quarter of
    them.
    """
    updates = steps * (MICROBATCHES if find_schedule(name).period(MICROBATCHES) == 1 else 1)
    return PipeMare(anneal_updates=updates // 4) if name == "pipemare" else find_schedule(
        name
    ), updates


def _loss(pipe: jvpipe.Pipeline, state: Any, data: Data) -> float:
    return float(
        np.mean([float(pipe.evaluate(state, batch)["loss"]) for batch in data.held_out[:8]])
    )


def main(names: list[str], steps: int = 400, **shape: int) -> int:
    """A row for each way: GPT-2 of a small shape on the prose that Python carries."""
    jax.config.update("jax_num_cpu_devices", 2)
    workload = load(
        "gpt2", "mini", **{"blocks": 4, "width": 128, "tokens": 32, "vocabulary": 1024, **shape}
    )
    parts = [f"{(i + 1) * steps // 4 * BATCH:,} examples" for i in range(4)]
    print(f"| schedule | updates | {' | '.join(parts)} | seconds |\n|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for name in names or WAYS:
            data = workload.open_data(None, Path(folder), 0, BATCH)
            print(train(WAYS[name], workload, data, steps).row(name), flush=True)
        known = workload.open_data(None, Path(folder), 0, BATCH).baseline_loss
    print(
        f"by how often each token occurs: {known:.3f}; by chance: "
        f"{math.log(workload.config.vocabulary):.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
