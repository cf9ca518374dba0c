"""How long a deep chain takes to plan, and how much memory.

    python -m experiments.planners.deep [LAYERS [DEVICES]]

A drawn chain (4,000 layers on 32 devices unless given) with `schedule="auto"`, 2 micro-batches per
device, under a limit of 0.6 of what keeping everything takes.
"""

import resource
import sys
import time
from collections.abc import Sequence

import numpy as np

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.papers.asking import ask
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule

SHARE, MEAN_BYTES = 0.6, 100


def chain(layers: int, devices: int) -> Problem:
    """A chain whose layers take 1.5 to 4.5 seconds, and leave 50 to 150 bytes that may be made
    again by a forward.
    """
    draw = np.random.default_rng(0)
    forward_s, kept = draw.uniform(0.5, 1.5, layers), draw.integers(50, 150, layers)
    costs = tuple(
        LayerCost(
            f"layer{i}",
            float(f),
            2 * float(f),
            (Option(int(k)), Option(0, extra_s=float(f))),
            split=SplitCost(float(f), float(f), 0, 0),
        )
        for i, (f, k) in enumerate(zip(forward_s, kept, strict=True))
    )
    edges = tuple(Edge(i, (i + 1,), 10) for i in range(layers - 1))
    # Under 1F1B the first device holds what its layers leave of as many micro-batches as there are
    # devices.
    limit = int(SHARE * MEAN_BYTES * layers)
    return Problem(Costs(costs, edges), devices, find_schedule("auto"), 2 * devices, limit)


def main(arguments: Sequence[str]) -> int:
    layers, devices = (int(x) for x in [*arguments, *("4000", "32")[len(arguments) :]])
    start_s = time.process_time()
    planned = ask("jvpipe", chain(layers, devices))
    own_s = time.process_time() - start_s
    most_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{layers} layers on {devices} devices: step {planned.step_s:.6g} s simulated")
    print(f"{own_s:.0f} processor seconds, {most_gb:.2f} GB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
