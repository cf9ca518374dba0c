"""Processor seconds of the planner of replicated stages.

    python -m experiments.dapple.speed [devices ...]

PipeDream's profiles on machines of eight devices as those of configuration A; a batch of as much
per device.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.dapple.run import costs_of, gap, shapes_on, short
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.papers.asking import ask_shapes

MODELS = (("gnmt", 64), ("vgg16", 128), ("resnet50", 128))
DEVICES = (16, 64, 256, 1024)


def rows(counts: Sequence[int], models: Sequence[tuple[str, int]] = MODELS) -> Iterator[str]:
    """Yields a row for each number of devices and model.

    Args:
        counts: of devices, multiples of eight from 16 on.
        models: and their examples per device.
    """
    base = find_cluster("v100-a")
    yield "| devices | model (batch) | plan | gap | processor s |"
    yield "|---|---|---|---|---|"
    for devices in counts:
        cluster = replace(base, machines=devices // base.devices_per_machine)
        for model, each in models:
            batch = devices * each
            shapes = shapes_on(costs_of(model), cluster, devices, batch)
            start_s = time.process_time()
            planned = ask_shapes("jvpipe", shapes)
            took_s = time.process_time() - start_s
            plan = short(shapes, planned.problem, planned.decision)
            if len(plan) >= 60:
                plan = f"{planned.problem.stages} stages on {devices} devices"
            above = f"{gap(shapes, planned):.0%}"
            yield f"| {devices} | {model} ({batch}) | {plan} | {above} | {took_s:.1f} |"


def main() -> None:
    """Prints the table as it is made."""
    for line in rows([int(given) for given in sys.argv[1:]] or DEVICES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
