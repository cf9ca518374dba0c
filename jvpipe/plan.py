"""`python -m jvpipe.plan`: plans a model at its real size, or a profiled graph, without running anything."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from jvpipe import models
from jvpipe.arguments import micro_batch_shapes
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.graph_file import read_graph
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.sizes import format_bytes, parse_bytes
from jvpipe.planners import PLANNERS, find_planner
from jvpipe.planners.forecast import bubble_fraction, forecast, simulated_step_s
from jvpipe.planners.infeasible import Infeasible
from jvpipe.planners.jvpipe import lower_bound
from jvpipe.planners.memory import Evaluation, evaluate
from jvpipe.planners.problem import Decision, Problem
from jvpipe.planning import Planned
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.report import timeline
from jvpipe.report.figures import timeline_figure
from jvpipe.report.reasons import cut_reasons
from jvpipe.schedules import find_schedule
from jvpipe.splitting import Candidate, Splitter, crowded
from jvpipe.trace.graph import Traced
from jvpipe.trace.model import trace_model


@dataclass(frozen=True)
class Options:
    """Plans a model, or a graph file, over the devices of a cluster."""

    model: str | None = None
    """Which model of jvpipe.models; its parameters are never made."""
    size: str | None = None
    """Which of its sizes; the smallest one if left out."""
    dtype: str = "float32"
    """The type that the model computes in."""
    graph: str | None = None
    """In place of a model: a graph.txt of PipeDream or a JSON file of dnn-partitioning."""
    stages: int = 4
    """Over how many devices."""
    hardware: str | None = None
    """A cluster by name (a100-40gb, v100-a, ...) or a TOML file; a100-40gb for a model, infinite links for a graph."""
    memory_limit: str | None = None
    """What each device may hold, such as 16GiB; for a model, what the hardware has."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, pipedream, pipedream-vertical-sync, 2bw."""
    planner: str = "jvpipe"
    """Which planner."""
    compare: str | None = None
    """Several planners side by side: `all`, or names with commas between."""
    microbatches: int = 8
    """Into how many parts a batch is split."""
    batch_size: int | None = None
    """Examples per step; the model's own if left out."""
    json: str | None = None
    """Writes the plan to this file."""
    timeline: str | None = None
    """Writes the simulated timeline to this file, for Perfetto."""
    figure: str | None = None
    """Draws the simulated timeline, with memory under it, to this file (png, svg or pdf)."""


@dataclass(frozen=True)
class Answer:
    """What a planner says; without a decision, why there is none."""

    planner: str
    planning_s: float
    decision: Decision | None = None
    evaluation: Evaluation | None = None
    infeasible: Infeasible | None = None
    splits: tuple[int, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for a user's mistake, 1 if no plan fits."""
    options = tyro.cli(Options, args=arguments, prog="python -m jvpipe.plan")
    try:
        problem = problem_of(options)
        names = _names(options)
        answers = [answer(problem, name) for name in names]
        if names == ["jvpipe"] and options.model is not None:
            problem, answers[0] = with_splits(options, problem, answers[0])
    except (ValueError, OSError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    console = Console(width=160)
    if len(answers) > 1:
        console.print(_comparison(problem, answers))
    first = answers[0]
    if first.decision is None or first.evaluation is None:
        print(f"no plan: {first.infeasible}", file=sys.stderr)
    elif len(answers) == 1:
        console.print(_stages(problem, first.decision, first.evaluation))
        console.print(_summary(problem, first), highlight=False)
        for reason in cut_reasons(problem, first.decision):
            console.print(reason, highlight=False)
    _write(options, problem, answers)
    return 0 if all(found.decision is not None for found in answers[:1]) else 1


def problem_of(options: Options) -> Problem:
    """What the options ask of a planner."""
    if (options.model is None) == (options.graph is None):
        raise ValueError("give one of --model and --graph")
    schedule, limit = find_schedule(options.schedule), parse_bytes(options.memory_limit)
    if options.graph is not None:
        cluster = None if options.hardware is None else find_cluster(options.hardware)
        file = read_graph(options.graph)
        problem = Problem(
            file.costs, options.stages, schedule, options.microbatches, limit or file.memory_limit_bytes, peer=file.link
        )
    else:
        cluster = find_cluster(options.hardware or "a100-40gb")
        costs = model_costs(options, cluster)
        limit = limit or cluster.device.memory_bytes
        problem = Problem(costs, options.stages, schedule, options.microbatches, limit)
    return problem if cluster is None else on_cluster(problem, cluster)


def on_cluster(problem: Problem, cluster: Cluster) -> Problem:
    """A problem with the links of a cluster; where stages lie on several machines, the slower link joins them."""
    if problem.stages > cluster.devices:
        raise ValueError(
            f"{problem.stages} stages need as many devices, {cluster.name} has {cluster.devices}: "
            "use fewer stages or a cluster of more machines"
        )
    within = problem.stages <= cluster.devices_per_machine
    peer: Link = cluster.peer if within else cluster.network
    return replace(
        problem,
        host=cluster.host,
        peer=peer,
        peer_uses_host=cluster.peer_uses_host and peer is not INFINITE,
        host_limit_bytes=cluster.host_memory_bytes,
        cluster=cluster,
    )


def model_costs(options: Options, cluster: Cluster) -> Costs:
    """The estimated costs of a model at its real size; nothing is allocated."""
    traced, cut = traced_model(options)
    return estimate(traced, cluster, cut(traced), options.microbatches)


def traced_model(options: Options) -> tuple[Traced, Callable[[Traced], OptimizerCut]]:
    """A model at its real size, and what cuts its optimizer for its layers."""
    workload = models.load(str(options.model), options.size, dtype=options.dtype)
    batch = workload.abstract_batch(options.batch_size or workload.batch_size)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(workload.init, key)
    micro_batch = micro_batch_shapes(batch, options.microbatches)
    model = trace_model(
        workload.loss_fn,
        params,
        micro_batch,
        jax.random.key(0),
        workload.initial_state(),
        has_state=workload.has_state,
    )

    def cut(traced: Traced) -> OptimizerCut:
        graph = traced.graph
        return cut_optimizer(
            workload.optimizer(workload.steps),
            model.params,
            [p.owner for p in graph.parameters],
            [len(p.readers) for p in graph.parameters],
            microbatches=None if graph.weighted else options.microbatches,
        )

    return model.traced, cut


def with_splits(options: Options, problem: Problem, found: Answer) -> tuple[Problem, Answer]:
    """The plan with layers cut in two, where that is faster. Nothing runs: that it keeps the bits is assumed."""
    cluster, decision = problem.cluster, found.decision
    if cluster is None or decision is None or not crowded(_planned(problem, decision)):
        return problem, found
    start_s = time.perf_counter()
    traced, cut = traced_model(options)

    def plan(traced: Traced) -> Candidate:
        optimizer = cut(traced)
        finer = replace(problem, costs=estimate(traced, cluster, optimizer, options.microbatches))
        return Candidate(traced, optimizer, _planned(finer, find_planner(found.planner)(finer)))

    begin = Candidate(traced, cut(traced), _planned(problem, decision))
    best = Splitter(cluster.device, lambda whole, layer, halves: True).better(begin, plan)
    problem, decision = best.planned.problem, best.planned.decision
    planning_s = found.planning_s + time.perf_counter() - start_s
    evaluation = evaluate(problem, decision)
    return problem, Answer(found.planner, planning_s, decision, evaluation, splits=best.traced.splits)


def _planned(problem: Problem, decision: Decision) -> Planned:
    return Planned(decision.plan(problem.costs, problem.schedule.name, "jvpipe"), problem, decision)


def answer(problem: Problem, planner: str) -> Answer:
    """Asks a planner, and looks at the clock."""
    start_s = time.perf_counter()
    try:
        decision = find_planner(planner)(problem)
    except Infeasible as infeasible:
        return Answer(planner, time.perf_counter() - start_s, infeasible=infeasible)
    planning_s = time.perf_counter() - start_s
    return Answer(planner, planning_s, decision, evaluate(problem, decision))


def as_json(problem: Problem, found: Answer) -> dict[str, Any]:
    """An answer in the form of `--json`."""
    head = {"planner": found.planner, "schedule": problem.schedule.name}
    if found.decision is None or found.evaluation is None:
        assert found.infeasible is not None
        return head | {
            "feasible": False,
            "reason": str(found.infeasible),
            "smallest_limit_bytes": found.infeasible.smallest_limit_bytes,
            "stages": [],
            "planning_s": found.planning_s,
        }
    costs, limit = problem.costs, problem.memory_limit_bytes
    ids = costs.ids or tuple(range(len(costs.layers)))
    plan = found.decision.plan(costs, problem.schedule.name, found.planner)
    pairwise(found.decision.bounds)
    stages = [
        {
            "layers": list(ids[i:j]),
            "devices": list(stage.devices),
            **{k: v for k, v in asdict(cost).items() if k not in ("link_s", "host_bytes")},
            "fates": dict(stage.fates),
        }
        for (i, j), stage, cost in zip(
            pairwise(found.decision.bounds), plan.stages, found.evaluation.stages, strict=True
        )
    ]
    return head | {
        "feasible": limit is None or found.evaluation.peak_bytes <= limit,
        "stages": stages,
        "bottleneck_s": found.evaluation.bottleneck_s,
        "step_s": simulated_step_s(problem, found.evaluation.stages),
        "lower_bound_s": lower_bound(problem),
        "bubble_fraction": bubble_fraction(problem, found.evaluation.stages),
        "planning_s": found.planning_s,
        "splits": list(found.splits),
    }


def _names(options: Options) -> list[str]:
    if options.compare is None:
        names = [options.planner]
    else:
        names = list(PLANNERS) if options.compare == "all" else options.compare.split(",")
    for name in names:
        find_planner(name)
    return names


def _write(options: Options, problem: Problem, answers: Sequence[Answer]) -> None:
    if options.json is not None:
        found = [as_json(problem, each) for each in answers]
        Path(options.json).write_text(json.dumps(found[0] if len(found) == 1 else found, indent=2) + "\n")
    decision = answers[0].decision
    if decision is None:
        return
    if options.timeline is not None:
        timeline.write(Path(options.timeline), list(forecast(problem, decision).spans()))
    if options.figure is not None:
        title = f"{options.model or options.graph}, {problem.schedule.name}, {answers[0].planner}"
        timeline_figure(forecast(problem, decision), options.figure, problem.memory_limit_bytes, title)


def _stages(problem: Problem, decision: Decision, evaluation: Evaluation) -> Table:
    table = Table("stage", "layers", "F ms", "B ms", "again ms", "swap ms", "comm ms", "in flight", "peak", "host")
    ids = problem.costs.ids or tuple(range(len(problem.costs.layers)))
    for s, ((i, j), cost) in enumerate(zip(pairwise(decision.bounds), evaluation.stages, strict=True)):
        seconds = (cost.forward_s, cost.backward_s, cost.recompute_s, cost.swap_s, cost.comm_s)
        table.add_row(
            str(s),
            f"{ids[i]} to {ids[j - 1]} ({j - i})",
            *(f"{1e3 * x:.2f}" for x in seconds),
            str(cost.in_flight),
            format_bytes(cost.peak_bytes),
            format_bytes(cost.host_bytes),
        )
    return table


def _summary(problem: Problem, found: Answer) -> str:
    assert found.evaluation is not None
    stages = found.evaluation.stages
    return (
        f"planner {found.planner}, schedule {problem.schedule.name}, {problem.microbatches} micro-batches: step "
        f"{1e3 * simulated_step_s(problem, stages):.2f} ms simulated (no plan is under "
        f"{1e3 * lower_bound(problem):.2f}), slowest stage {1e3 * found.evaluation.bottleneck_s:.2f} ms, "
        f"{bubble_fraction(problem, stages):.1%} idle, planned in {found.planning_s:.2f} s"
        + (f"; {len(found.splits)} layers are cut in two" if found.splits else "")
    )


def _comparison(problem: Problem, answers: Sequence[Answer]) -> Table:
    table = Table("planner", "layers per stage", "slowest stage ms", "step ms", "idle", "peak", "planned in s")
    limit = problem.memory_limit_bytes
    for found in answers:
        if found.decision is None or found.evaluation is None:
            table.add_row(found.planner, "no plan fits", "", "", "", "", f"{found.planning_s:.2f}")
            continue
        over = limit is not None and found.evaluation.peak_bytes > limit
        stages = found.evaluation.stages
        table.add_row(
            found.planner,
            " ".join(str(j - i) for i, j in pairwise(found.decision.bounds)),
            f"{1e3 * found.evaluation.bottleneck_s:.2f}",
            f"{1e3 * simulated_step_s(problem, stages):.2f}",
            f"{bubble_fraction(problem, stages):.1%}",
            format_bytes(found.evaluation.peak_bytes) + (" (over the limit)" if over else ""),
            f"{found.planning_s:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
