"""Simulated at real size: python -m experiments.nas.simulated [STREAM] [gpipe|pipedream] [COUNT]

STREAM is changed, evolved, tight or amoebanet.

Evolved transformers of 768 units and 1024 tokens, or evolved AmoebaNets on images of 224 by 224, on
A100s of 40 GiB. Costs are the roofline's. A switch of the full variant is what it moves over the
links, and, in a stream, the time that draining and filling it loses; planning counts as far as the
architecture before was not trained so long.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from experiments.nas import streams, variants
from experiments.nas.paced import traced
from experiments.nas.report import MICRO_BATCHES, STEPS, keep, report
from jvpipe import models
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.estimate import estimate
from jvpipe.models.architecture import Architecture
from jvpipe.models.workload import Workload
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.programs.optimizer_pieces import cut_optimizer
from jvpipe.programs.store import ProgramStore
from jvpipe.schedules import find_schedule

CLUSTER = find_cluster("a100-40gb")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "changed": ("evolved-transformer", {"blocks": streams.STAGES * streams.PER_STAGE}),
    "evolved": ("evolved-transformer", {"blocks": 24}),
    "tight": ("evolved-transformer", {"blocks": 24}),
    "amoebanet": ("evolved-amoebanet", {"slots": 24, "filters": 96, "side": 64}),
}
MICRO_BATCH = {"changed": 8, "evolved": 8, "tight": 96, "amoebanet": 64}
"""With which PipeDream holds everything of the first architecture, with room to spare; but for
`tight`, where what it would keep is too much.
"""


@dataclass(frozen=True)
class Planned:
    """An architecture as a planner sees it; `prepared_s` is what tracing it and cutting its
    optimizer took here.
    """

    problem: Problem
    graph: Any
    prepared_s: float

    @property
    def names(self) -> list[str]:
        """Of the layers."""
        return [self.graph.label(layer) for layer in self.graph.layers]

    def under(self, schedule: str) -> "Planned":
        """The same under a schedule."""
        return replace(self, problem=replace(self.problem, schedule=find_schedule(schedule)))

    def step_s(self, decision: Decision) -> float:
        """Seconds per step in the simulator."""
        return simulated_step_s(self.problem, evaluate_decision(self.problem, decision).stages)

    def places(self, decision: Decision) -> dict[str, tuple[int, int]]:
        """The stage of each layer, and the bytes that go with it."""
        costs = self.problem.costs.layers
        sizes = [layer.parameter_bytes + layer.optimizer_bytes for layer in costs]
        stages = [s for s, (i, j) in enumerate(pairwise(decision.bounds)) for _ in range(i, j)]
        return dict(zip(self.names, zip(stages, sizes, strict=True), strict=True))


def workload_of(name: str) -> Workload:
    """The model of a stream at its real size."""
    model, options = MODELS[name]
    if model == "evolved-transformer":
        return models.load(model, "small", vocabulary=32768, dropout=0.0, **options)
    return models.load(model, "mini", **options)


def architectures_of(name: str, workload: Workload, count: int) -> list[Architecture]:
    """Those of a stream."""
    if name == "changed":
        return streams.changed([block for block in default(workload).slots[:2] if block])
    assert workload.supernet is not None
    return streams.evolved(workload.supernet.space, count, streams.stand_in_loss)


def default(workload: Workload) -> Architecture:
    """What fills all slots."""
    assert workload.supernet is not None
    return workload.supernet.default


def planned(workload: Workload, architecture: Architecture, micro_batch: int) -> Planned:
    """Traces from shapes alone and estimates."""
    supernet = workload.supernet
    assert supernet is not None
    start_s = time.perf_counter()
    model = traced(workload, supernet, architecture, micro_batch)
    graph = model.traced.graph
    owners, readers = (
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
    )
    optimizer = cut_optimizer(
        workload.optimizer(1000), model.params, owners, readers, microbatches=None
    )
    prepared_s = time.perf_counter() - start_s
    costs = estimate(model.traced, CLUSTER, optimizer, MICRO_BATCHES, store=ProgramStore())
    limit, host = CLUSTER.device.memory_bytes, CLUSTER.host_memory_bytes
    schedule = find_schedule("gpipe")
    problem = Problem(
        costs, streams.STAGES, schedule, MICRO_BATCHES, limit, host, CLUSTER.host, CLUSTER.peer
    )
    return Planned(problem, graph, prepared_s)


def homes_of(one: Planned, slots: int) -> list[int]:
    """Where the upper layer's own planner, which knows of no limit, has the slots of an
    architecture.
    """
    problem = replace(one.problem, memory_limit_bytes=None)
    bounds = find_planner(problem.schedule.name).decide(problem).bounds
    return streams.homes(one.graph, slots, [j - i for i, j in pairwise(bounds)])


def switch_s(before: tuple[Planned, Decision], after: tuple[Planned, Decision]) -> float:
    """What a change of model and plan takes: copies to the device that gets most, and a stream's
    draining and filling.

    What is new comes from the host, what has moved from another device, with its optimizer's state.
    """
    (old, was), (new, now) = before, after
    had, taken_s = old.places(was), [0.0] * streams.STAGES
    for name, (stage, size) in new.places(now).items():
        if name not in had:
            taken_s[stage] += new.problem.host.seconds(size)
        elif had[name][0] != stage:
            taken_s[stage] += new.problem.peer.seconds(size)
    stages_s = [stage.compute_s for stage in evaluate_decision(new.problem, now).stages]
    return max(taken_s) + (
        0.0 if new.problem.schedule.synchronous else sum(stages_s) - max(stages_s)
    )


def seconds(
    found: Sequence[Planned], first: Sequence[int], whole: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds per step of each variant, by architecture; those of the full one with its
    switches.
    """
    step_s: dict[str, list[float]] = {name: [] for name in variants.NAMES}
    before: tuple[Planned, Decision] | None = None
    for one in found:
        start_s = time.perf_counter()
        best = find_planner("jvpipe").decide(one.problem)
        planning_s = one.prepared_s + time.perf_counter() - start_s
        bounds = streams.home_bounds(one.graph, whole)
        for name, decisions in (
            (
                "static, first",
                variants.static_at_home(one.problem, streams.home_bounds(one.graph, first)),
            ),
            ("static", variants.static_at_home(one.problem, bounds)),
            ("swap/recompute", variants.chosen_at_home(one.problem, bounds)),
        ):
            step_s[name].append(one.step_s(variants.fitting(one.problem, decisions)))
        lost_s = 0.0
        if before is not None:
            lost_s = switch_s(before, (one, best)) + max(
                0.0, planning_s - STEPS * step_s["ideal"][-1]
            )
        step_s["ideal"].append(one.step_s(best))
        step_s["full"].append(step_s["ideal"][-1] + lost_s / STEPS)
        before = one, best
    return step_s


def main() -> None:
    """Every schedule that is named, or both."""
    words = sys.argv[1:]
    name = words[0] if words else "changed"
    workload = workload_of(name)
    count = next((int(word) for word in words if word.isdigit()), streams.COUNT)
    architectures = architectures_of(name, workload, count)
    found = [planned(workload, architecture, MICRO_BATCH[name]) for architecture in architectures]
    whole = (
        found[0] if name == "changed" else planned(workload, default(workload), MICRO_BATCH[name])
    )
    for schedule in [word for word in words if word in ("gpipe", "pipedream")] or [
        "gpipe",
        "pipedream",
    ]:
        homes = [
            homes_of(one.under(schedule), len(architectures[0].slots)) for one in (found[0], whole)
        ]
        step_s = seconds([one.under(schedule) for one in found], *homes)
        report(f"{name}, simulated, {schedule}", step_s, [len(one.names) for one in found])
        keep(f"{name}_simulated", schedule, step_s)


if __name__ == "__main__":
    main()
