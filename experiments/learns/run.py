"""Whether models learn: each at its size mini, by its own recipe, on its default data, as a
pipeline of two stages.

Usage: python -m experiments.learns.run [MODEL ...]. Each model is trained by a process of its own.
"""

import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

import jvpipe
from experiments.learns.translations import judged_translation
from jvpipe.models import NAMES, Data, load

STEPS: Mapping[str, int] = {
    "transformer": 500,
    "gnmt": 400,
    "xlnet": 400,
    "unet": 500,
    "amoebanet": 100,
    "llama": 120,
} | {
    "gpt2": 120,
    "evolved-transformer": 80,
}
"""Of each model, 300 unless told: enough to learn from, few enough for its minutes."""
HEADER = """| model | parameters | steps of examples | metric | trivial | learned | seconds | of processors |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Learned:
    """What a model has learned: its metrics on held-out data, each after that of who knows
    frequencies alone.

    `seconds` are of all: reading the data, tracing, planning, compiling, training, evaluating;
    `processor_s` are those of all cores together.
    """

    model: str
    parameters: int
    steps: int
    examples: int
    metrics: Mapping[str, tuple[float, float]]
    seconds: float
    processor_s: float

    def row(self) -> str:
        cells = (
            f"{self.model} | {self.parameters:,} | {self.steps} of {self.examples} | "
            f"{', '.join(self.metrics)}",
            *(", ".join(f"{pair[i]:.3g}" for pair in self.metrics.values()) for i in range(2)),
            f"{self.seconds:.0f} | {self.processor_s:.0f}",
        )
        return f"| {' | '.join(cells)} |"


def learn(name: str, steps: int, size: str = "mini", planner: str = "jvpipe") -> Learned:
    """Trains a model on as many devices as there are, at most two, under the plan of a planner."""
    start_s = time.perf_counter()
    workload, devices = load(name, size), jax.devices()[:2]
    with TemporaryDirectory() as folder:
        data = workload.open_data(None, Path(folder), 0, workload.batch_size)
        pipe = jvpipe.Pipeline(
            workload.loss_fn,
            workload.optimizer(steps),
            stages=len(devices),
            microbatches=4,
            planner=planner,
            devices=devices,
            has_aux=workload.has_aux,
            has_state=workload.has_state,
        )
        state = pipe.init(workload.init, data.example, jax.random.key(0), workload.initial_state())
        ((state, _),) = deque(pipe.run(state, data.train, steps), maxlen=1)
        params = pipe.params(state)
        if "lengths" in data.example:
            metrics = judged_translation(workload, params, Path(folder))
        else:
            metrics = judged(data, [pipe.evaluate(state, batch) for batch in data.held_out])
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - start_s, time.process_time()
    return Learned(name, count, steps, workload.batch_size, metrics, *seconds)


def judged(data: Data, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """By the name of a metric, its value without having looked at the input, and its value under a
    model.
    """
    aux = evaluations[0].get("aux", {})
    for name, trivial in (("top_1", most_frequent), ("dice", all_of_it)):
        if name in aux:
            return {
                name: (
                    trivial(data),
                    float(np.mean([float(found["aux"][name]) for found in evaluations])),
                )
            }
    loss = float(np.mean([float(found["loss"]) for found in evaluations]))
    return {"perplexity": (math.exp(data.baseline_loss), math.exp(loss))}


def most_frequent(data: Data) -> float:
    """The top-1 of telling the class that is most frequent among the held-out images."""
    targets = np.concatenate([batch["targets"] for batch in data.held_out])
    return float(np.bincount(targets).max() / len(targets))


def all_of_it(data: Data) -> float:
    """Dice's coefficient of telling that every pixel belongs to the mask."""
    share = np.mean([batch["masks"].mean() for batch in data.held_out])
    return float(2 * share / (share + 1))


def main(names: Sequence[str]) -> int:
    if len(names) == 1:
        jax.config.update("jax_num_cpu_devices", 2)
        print(learn(names[0], STEPS.get(names[0], 300)).row(), flush=True)
        return 0
    print(HEADER, flush=True)
    return max(
        subprocess.run([sys.executable, "-m", "experiments.learns.run", name]).returncode
        for name in names
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or NAMES))
