"""Shapes of small models beside all that there are.

    python -m experiments.planners.shapes [problems [seed]]

Models of 4 to 6 unlike layers are drawn, on 3 to 6 devices of one machine, of two, or of a machine
each, every second one under a memory limit. Everything there is along the orders of devices is
simulated: cuts, devices of each stage, sizes of micro-batches; stages keep everything or compute
all again. The planner chooses fates layer by layer too, so that it may be faster than all of that.
"""

import random
import sys
from collections.abc import Iterator
from statistics import median

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.papers.asking import ask_shapes
from jvpipe.planners.joint.shape_search import rough_plans
from jvpipe.planners.model.shapes import Shapes
from tests.planners.joint.shapes import (
    GPU,
    best_s,
    chain,
    every_path,
    layer,
    shapes_of,
    stages_of,
)

PROBLEMS = 60
BATCHES = (6, 8, 12)
MACHINES = ((3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (1, 3), (1, 4), (1, 5))
"""Devices of a machine, and machines."""
NETWORKS = (10.0, 20.0, 200.0)
SAME = 1e-9
TIGHT = 2
"""A limit is the least of what so many plans take that keep everything, any that there are."""


def drawn(draw: random.Random) -> Shapes:
    """Draws a problem without a limit."""
    layers = [
        layer(draw.uniform(0.5, 2.0), draw.randint(0, 60), draw.randint(1, 9))
        for _ in range(draw.randint(4, 6))
    ]
    costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
    each, machines = draw.choice(MACHINES)
    network = Link(draw.choice(NETWORKS))
    cluster = Cluster("drawn", GPU, each, machines, peer=Link(200.0), network=network)
    return shapes_of(costs, cluster, draw.choice(BATCHES))


def limited(shapes: Shapes, draw: random.Random) -> Shapes:
    """The same under a limit that some plans keep, but not all."""
    some = draw.sample(list(every_path(shapes)), TIGHT)
    peaks = (max(stage.peak_bytes for stage in stages_of(shapes, path)) for path in some)
    return shapes.under(min(peaks))


def ratios(shapes: Shapes) -> tuple[float, float]:
    """How many times as long as the best of all plans take: the best rough plan, and the
    planner's.
    """
    least_s = best_s(shapes)
    return rough_plans(shapes)[0].step_s / least_s, ask_shapes("jvpipe", shapes).step_s / least_s


def table(problems: int = PROBLEMS, seed: int = 0) -> Iterator[str]:
    """Yields the table.

    Args:
        problems: how many are drawn.
        seed: of what is drawn.
    """
    draw, found = random.Random(seed), list[tuple[float, float]]()
    for number in range(problems):
        shapes = drawn(draw)
        found.append(ratios(limited(shapes, draw) if number % 2 else shapes))
    yield "| limit | plans | problems | optimal or faster | median | worst |"
    yield "|---|---|---|---|---|---|"
    for limit, some in (("none", found[::2]), ("drawn", found[1::2])):
        for what, every in zip(("rough", "planned"), zip(*some, strict=True), strict=True):
            optimal = sum(ratio <= 1 + SAME for ratio in every)
            told = f"{len(every)} | {optimal} | {median(every):.4f} | {max(every):.4f}"
            yield f"| {limit} | {what} | {told} |"


if __name__ == "__main__":
    for line in table(*map(int, sys.argv[1:3])):
        print(line, flush=True)
