"""AdaPipe's comparison, planned and simulated at its models' size.

    python -m experiments.adapipe.run [MODEL ...]

Nothing runs: layers are estimated from their shapes. A stage is a machine of eight A100s of 80 GB,
taken as one device of eight times the memory and speed: a tensor-parallel group whose own
collectives take no time.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import optax

from experiments.planners.questions import question_of
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.models import load
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s

STAGES, GROUP = 8, 8
MICRO_BATCHES = 32


def grouped(cluster: Cluster) -> Cluster:
    """Machines of `GROUP` devices as devices of so many times the memory and the speeds, a network
    each.
    """
    one = cluster.device
    device = Accelerator(
        f"{GROUP} x {one.name}",
        GROUP * one.memory_bytes,
        GROUP * one.memory_bytes_per_s,
        {dtype: GROUP * rate for dtype, rate in one.flops_per_s.items()},
        one.launch_s,
        GROUP * one.elementwise_per_s,
    )
    host = Link(GROUP * cluster.host.bytes_per_s, cluster.host.latency_s)
    network = cluster.network
    return Cluster(device.name, device, 1, STAGES, host, network, network, peer_uses_host=False)


@dataclass(frozen=True)
class Subject:
    """A model and its dials, beside the tokens of a record; micro-batches are of one record."""

    title: str
    model: str
    dials: Mapping[str, Any] = field(default_factory=dict)

    def problem(self, tokens: int, cluster: Cluster) -> Problem:
        """Over the machines of a cluster, products in bfloat16, all else in float32, under 1F1B."""
        workload = load(self.model, **self.dials, tokens=tokens, dtype="bfloat16")
        return question_of(
            workload, MICRO_BATCHES, MICRO_BATCHES, cluster.machines, optax.adamw(1e-4)
        ).problem(cluster)


GPT3 = {"size": "770m", "blocks": 96, "width": 12288, "heads": 96, "dropout": 0.0}
LLAMA = {"size": "7b", "blocks": 80, "width": 8192, "heads": 64, "groups": 8, "hidden": 28672}
SUBJECTS = (Subject("GPT-3 175B", "gpt2", GPT3), Subject("Llama 2 70B", "llama", LLAMA))
TOKENS = (2048, 4096, 8192)


def step_s(problem: Problem, decision: Decision) -> float | None:
    """The simulated seconds of a step; None if a device would hold more than it has."""
    found = evaluate_decision(problem, decision)
    limit = problem.memory_limit_bytes
    return (
        None
        if limit is not None and found.peak_bytes > limit
        else simulated_step_s(problem, found.stages)
    )


def uniform(problem: Problem, *, again: bool) -> float | None:
    """Even cuts; every layer keeps everything, or nothing but its input."""
    bounds = find_planner("even").decide(problem).bounds
    choices = tuple(len(layer.options) - 1 if again else 0 for layer in problem.costs.layers)
    return step_s(problem, Decision(bounds, choices))


def asked(problem: Problem, planner: str) -> float | None:
    """What a planner finds."""
    try:
        return step_s(problem, find_planner(planner).decide(problem))
    except Infeasible:
        return None


def evenly_cut(problem: Problem) -> Problem:
    """The problem with even cuts given."""
    bounds = find_planner("even").decide(problem).bounds
    together = tuple(tuple(range(i, j)) for i, j in pairwise(bounds))
    return replace(problem, costs=replace(problem.costs, together=together))


def without_swaps(problem: Problem) -> Problem:
    """The problem in which nothing may be swapped."""
    layers = tuple(
        replace(x, options=tuple(o for o in x.options if not o.swapped_bytes and not o.swaps_input))
        for x in problem.costs.layers
    )
    return replace(problem, costs=replace(problem.costs, layers=layers))


WAYS: Mapping[str, Callable[[Problem], float | None]] = {
    "even, all kept": lambda problem: uniform(problem, again=False),
    "even, all again": lambda problem: uniform(problem, again=True),
    "even, AdaPipe's recomputation": lambda problem: asked(evenly_cut(problem), "adapipe"),
    "AdaPipe": lambda problem: asked(problem, "adapipe"),
    "jvpipe, no swaps": lambda problem: asked(without_swaps(problem), "jvpipe"),
    "jvpipe": lambda problem: asked(problem, "jvpipe"),
}


def cells(problem: Problem) -> Iterator[str]:
    """Yields each way's seconds of a step, and how many times faster it is than the better uniform
    one.
    """
    found = {name: way(problem) for name, way in WAYS.items()}
    known = [x for x in list(found.values())[:2] if x is not None]
    for seconds in found.values():
        speed = f" ({min(known) / seconds:.2f}x)" if seconds and known else ""
        yield "does not fit" if seconds is None else f"{seconds:.2f}{speed}"


def main(names: Sequence[str]) -> int:
    cluster = grouped(find_cluster("a100-80gb"))
    print(f"| model | tokens | {' | '.join(WAYS)} |\n|---|---{'|---' * len(WAYS)}|", flush=True)
    for subject in SUBJECTS:
        if names and subject.model not in names:
            continue
        for tokens in TOKENS:
            told = " | ".join(cells(subject.problem(tokens, cluster)))
            print(f"| {subject.title} | {tokens} | {told} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
