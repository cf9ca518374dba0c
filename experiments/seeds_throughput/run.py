"""vPipe's comparison, planned and simulated.

    python -m experiments.seeds_throughput.run [DEVICES or MODEL ...]

PipeDream and GPipe, each with its own planner and with jvpipe's cuts and fates under the devices'
memory. Nothing runs: layers are estimated from their shapes, plans are simulated.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import optax

from experiments.max_batch.subjects import Costing, costings
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import Cluster
from jvpipe.models import Workload, load
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from jvpipe.session.question import on_cluster

CLUSTER = replace(find_cluster("2080ti"), machines=4)
"""vPipe's hosts: four RTX 2080 Ti each on PCIe 3, 40 Gbps between hosts."""
MICRO_BATCHES, ANCHORS, MOST = 32, (4, 16), 256
"""Micro-batches of a step, the micro-batch sizes at which a model is traced, and the largest one
that is tried.
"""
MODELS: Mapping[str, tuple[str, str]] = {
    "bert": ("bert", "large"),
    "transformer": ("transformer", "big"),
    "gnmt": ("gnmt", "16"),
    "amoebanet": ("amoebanet", "82m"),
    "vgg": ("vgg", "16"),
    "resnet": ("resnet", "50"),
}


@dataclass(frozen=True)
class System:
    """A pipeline as a paper runs it: its schedule, and the planner that knows of no memory
    limit.
    """

    name: str
    schedule: str
    planner: str


SYSTEMS = (System("PipeDream", "pipedream", "pipedream"), System("GPipe", "1f1b", "gpipe"))
"""Both alternate forwards and backwards once they are warm, as vPipe's authors have them; GPipe
flushes each step.
"""


@dataclass(frozen=True)
class Rate:
    """The examples per second of a plan at a micro-batch size; of none: zeros."""

    size: int
    per_s: float

    def __str__(self) -> str:
        return f"{self.per_s:.3g} ({self.size})" if self.per_s else "does not fit"


NONE = Rate(0, 0.0)


def rate_of(
    system: System, planner: str, costs: Costs, size: int, devices: int, cluster: Cluster
) -> Rate:
    """The rate of a planner's plan at a micro-batch size; none if it finds none, or one beyond the
    devices' memory.

    jvpipe's planner alone is told how much that is.
    """
    limit = cluster.device.memory_bytes
    told = limit if planner == "jvpipe" else None
    problem = on_cluster(
        Problem(costs, devices, find_schedule(system.schedule), MICRO_BATCHES, told), cluster
    )
    try:
        decision = find_planner(planner).decide(problem)
    except Infeasible:
        return NONE
    found = evaluate_decision(problem, decision)
    if found.peak_bytes > limit:
        return NONE
    step_s = simulated_step_s(problem, found.stages)
    return Rate(size, problem.microbatches * size / step_s)


def compared(
    system: System, costing: Callable[[int], Costs], devices: int, cluster: Cluster
) -> tuple[Rate, Rate]:
    """A system's rate with its own planner and with jvpipe's: each at the size that is best for it.

    With its own planner sizes are all powers of two, with jvpipe's what is best without, twice and
    four times that.
    """

    def fastest(planner: str, sizes: Sequence[int]) -> Rate:
        rates = (rate_of(system, planner, costing(size), size, devices, cluster) for size in sizes)
        return max(rates, key=lambda rate: rate.per_s)

    own = fastest(system.planner, [1 << i for i in range(MOST.bit_length())])
    return own, fastest("jvpipe", [max(own.size, 1) << i for i in range(3)])


def row(name: str, costing: Callable[[int], Costs], devices: int, cluster: Cluster) -> str:
    """A line of the table."""
    cells = [name, str(devices)]
    for system in SYSTEMS:
        own, ours = compared(system, costing, devices, cluster)
        gain = f"{ours.per_s / own.per_s - 1:+.0%}" if own.per_s and ours.per_s else ""
        cells += [str(own), str(ours), gain]
    return f"| {' | '.join(cells)} |"


def as_pytorch(workload: Workload, cluster: Cluster) -> Costing:
    """A model's costs by micro-batch size, values kept as PyTorch keeps them."""
    return costings(workload, optax.adamw(1e-3), cluster, ANCHORS)[1]


def by_size(costing: Callable[[int], Costs], devices: int, sizes: Sequence[int]) -> Iterator[str]:
    """Yields the rates of both systems, with their own planner and with jvpipe's, at given
    sizes.
    """
    yield (
        f"| examples of a micro-batch | {' | '.join(map(str, sizes))} |\n|---{'|---' * len(sizes)}|"
    )
    for system in SYSTEMS:
        for planner in (system.planner, "jvpipe"):
            rates = [
                rate_of(system, planner, costing(size), size, devices, CLUSTER).per_s
                for size in sizes
            ]
            told = [f"{rate:.3g}" if rate else "does not fit" for rate in rates]
            yield (
                f"| {system.name}{' with jvpipe' if planner == 'jvpipe' else ''} | "
                f"{' | '.join(told)} |"
            )


def main(words: Sequence[str]) -> int:
    devices = [int(word) for word in words if word.isdigit()] or [4, 8]
    names = [name for name in MODELS if name in words] or list(MODELS)
    print(
        f"| model | devices | {' | '.join(f'{x.name} | with jvpipe | ' for x in SYSTEMS)}|\n|---"
        + "|---" * 7
        + "|"
    )
    for name in names:
        costing = as_pytorch(load(*MODELS[name]), CLUSTER)
        for count in devices:
            print(row(f"{name} {MODELS[name][1]}", costing, count, CLUSTER), flush=True)
    if "bert" in names:
        print("\nbert large on 8 devices, by the size of a micro-batch\n")
        for line in by_size(as_pytorch(load(*MODELS["bert"]), CLUSTER), 8, (1, 4, 16, 64)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
