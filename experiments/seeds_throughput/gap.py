"""What closes the gap to vPipe's printed gains.

    python -m experiments.seeds_throughput.gap MODEL ... [DEVICES ...]

The comparison of `run` under one assumption more at a time, and under all of them. Nothing runs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.predicts.layers import run_by
from experiments.predicts.vpipe import STASHED_BYTES
from experiments.seeds_throughput.run import (
    CLUSTER,
    MODELS,
    MOST,
    SYSTEMS,
    Rate,
    System,
    as_pytorch,
    rate_of,
)
from jvpipe.cost.costs import Costs
from jvpipe.cost.families import PYTORCH
from jvpipe.cost.hardware import Cluster
from jvpipe.models import load

Costing = Callable[[int], Costs]
IN_PYTORCH = replace(CLUSTER, device=run_by(PYTORCH, CLUSTER.device))
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Assumption:
    """What is supposed of the rivals and their framework.

    Attributes:
        name: as the table has it.
        share: the part that a rival's micro-batch is of what fits here. vPipe's repository runs
            PipeDream's BERT at 4 where 16 fit.
        stashes: weights are stashed by copies, and gradients set to zero, with each update.
        cluster: with what runs its devices.
    """

    name: str
    share: int = 1
    stashes: bool = False
    cluster: Cluster = CLUSTER


ASSUMPTIONS = (
    Assumption("none: as above"),
    Assumption("rivals at a quarter of the micro-batch that is best here", share=4),
    Assumption("weights stashed by copies", stashes=True),
    Assumption("kernels of PyTorch", cluster=IN_PYTORCH),
    Assumption("all three", 4, stashes=True, cluster=IN_PYTORCH),
)


def stashed(costs: Costs) -> Costs:
    """Costs with what vPipe's runtime moves of each parameter beside its update."""
    per_byte_s = STASHED_BYTES / FLOAT_BYTES / CLUSTER.device.memory_bytes_per_s
    layers = (
        replace(layer, update_s=layer.update_s + per_byte_s * layer.parameter_bytes)
        for layer in costs.layers
    )
    return replace(costs, layers=tuple(layers))


def gain(system: System, assumption: Assumption, costing: Costing, devices: int) -> str:
    """How much faster a system is with jvpipe's cuts and fates, and at which micro-batches."""

    def rate(planner: str, size: int) -> Rate:
        costs = stashed(costing(size)) if assumption.stashes else costing(size)
        return rate_of(system, planner, costs, size, devices, assumption.cluster)

    def fastest(planner: str, sizes: Sequence[int]) -> Rate:
        return max((rate(planner, size) for size in sizes), key=lambda found: found.per_s)

    best = fastest(system.planner, [1 << i for i in range(MOST.bit_length())])
    ours = fastest("jvpipe", [max(best.size, 1) << i for i in range(3)])
    rival = (
        best
        if assumption.share == 1
        else rate(system.planner, max(best.size // assumption.share, 1))
    )
    if not rival.per_s or not ours.per_s:
        return "does not fit"
    return f"{ours.per_s / rival.per_s - 1:+.0%} ({rival.size}, {ours.size})"


def table(names: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Yields a row for each model, number of devices and assumption.

    Args:
        names: of models.
        counts: of devices.
    """
    yield f"| model | devices | assumption | {' | '.join(f'over {x.name}' for x in SYSTEMS)} |"
    yield "|---|---|---|---|---|"
    for name in names:
        workload = load(*MODELS[name])
        clusters = {x.cluster.device.framework: x.cluster for x in ASSUMPTIONS}
        costings = {by: as_pytorch(workload, cluster) for by, cluster in clusters.items()}
        for devices in counts:
            for assumption in ASSUMPTIONS:
                costing = costings[assumption.cluster.device.framework]
                cells = [gain(system, assumption, costing, devices) for system in SYSTEMS]
                title = f"{' '.join(MODELS[name])} | {devices} | {assumption.name}"
                yield f"| {title} | {' | '.join(cells)} |"


def main(words: Sequence[str]) -> None:
    """Prints the table as it is made."""
    names = [name for name in MODELS if name in words] or list(MODELS)
    for line in table(names, [int(word) for word in words if word.isdigit()] or [8]):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
