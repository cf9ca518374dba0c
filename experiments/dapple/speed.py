"""Processor seconds of the planner of replicated stages: python -m experiments.dapple.speed [devices ...]

PipeDream's profiles on machines of eight devices as those of configuration A; a batch of as much per device.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.dapple.run import costs_of, short
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.planners.joint.replicas_planner import plan_replicas
from jvpipe.planners.model.replicas_problem import ReplicaProblem

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
            batch, limit = devices * each, base.device.memory_bytes
            problem = ReplicaProblem(costs_of(model), cluster, devices, batch, limit)
            start_s = time.process_time()
            answer = plan_replicas(problem)
            took_s = time.process_time() - start_s
            plan = short(answer.best.plan)
            told = (
                plan if len(plan) < 60 else f"{answer.best.plan.stages} stages on {devices} devices"
            )
            yield f"| {devices} | {model} ({batch}) | {told} | {answer.gap:.0%} | {took_s:.1f} |"


def main() -> None:
    """Prints the table as it is made."""
    for line in rows([int(given) for given in sys.argv[1:]] or DEVICES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
