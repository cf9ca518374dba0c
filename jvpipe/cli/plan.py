"""`python -m jvpipe.plan`: plans a model at its real size, or a profiled graph, without running anything."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import tyro
from rich.console import Console

from jvpipe.cli.found_model import find_model
from jvpipe.cli.outputs import writing
from jvpipe.cli.plan_options import Options, check, check_sums, splits
from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.files.cluster_file import find_cluster
from jvpipe.cost.files.graph_file import read_graph
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.sizes import parse_bytes
from jvpipe.planners import find_planner
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.model.forecast import forecast
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.report import timeline
from jvpipe.report.answers import Answer, as_json, best_first, comparison, stage_table, summary, why_not
from jvpipe.report.figures import timeline_figure
from jvpipe.report.reasons import cut_reasons
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import AUTO
from jvpipe.session.batches import micro_batch_shapes
from jvpipe.session.planning import Planned, ask
from jvpipe.session.splitting import CutCandidate, Splitter, crowded
from jvpipe.trace.graph import Traced
from jvpipe.trace.model import trace_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for a user's mistake, 1 if no plan fits."""
    options = tyro.cli(Options, args=arguments, prog="python -m jvpipe.plan")
    try:
        names = check(options)
        problem = problem_of(options)
        open_order = problem
        problem, answers = searched(problem) if problem.schedule == AUTO else (problem, asked(problem, names))
        if names == ["jvpipe"] and options.model is not None:
            problem, answers[0] = with_splits(options, open_order, problem, answers[0])
    except (ValueError, OSError) as mistake:
        return _error(mistake)
    bound_s = lower_bound(problem) if answers[0].decision is not None else math.inf
    _show(problem, answers, bound_s)
    try:
        _write(options, problem, answers, bound_s)
    except OSError as mistake:
        return _error(mistake)
    return 0 if answers[0].fits(problem) else 1


def _error(mistake: Exception) -> int:
    print("error:", *str(mistake).splitlines(), file=sys.stderr)
    return 2


def problem_of(options: Options) -> Problem:
    """The question that the options put to a planner."""
    schedule, limit, link = find_schedule(options.schedule), parse_bytes(options.memory_limit), INFINITE
    hardware = "a100-40gb" if options.hardware is None and options.graph is None else options.hardware
    cluster = None if hardware is None else find_cluster(hardware)
    if cluster is not None:
        _check_devices(options.stages, cluster)
    if options.graph is not None:
        file = read_graph(options.graph)
        costs, limit, link = file.costs, limit or file.memory_limit_bytes, file.link
    else:
        assert cluster is not None, "a model has costs on some hardware"
        costs, limit = model_costs(options, cluster), limit or cluster.device.memory_bytes
    problem = Problem(costs, schedule.stages_on(options.stages), schedule, options.microbatches, limit, peer=link)
    problem = problem if cluster is None else on_cluster(problem, cluster)
    check_sums(problem)
    return problem


def _check_devices(stages: int, cluster: Cluster) -> None:
    if stages > cluster.devices:
        raise ValueError(
            f"{stages} stages need as many devices, {cluster.name} has {cluster.devices}: "
            "use fewer stages or a cluster of more machines"
        )


def on_cluster(problem: Problem, cluster: Cluster) -> Problem:
    """A problem with the links of a cluster; where stages lie on several machines, the slower link joins them."""
    _check_devices(problem.devices, cluster)
    within = problem.devices <= cluster.devices_per_machine
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
    return estimate(traced, cluster, cut(traced), options.microbatches, split=splits(options))


def traced_model(options: Options) -> tuple[Traced, Callable[[Traced], OptimizerCut]]:
    """A model at its real size, and what cuts its optimizer for its layers."""
    workload = find_model(str(options.model), options.size, options.dtype)
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
        has_aux=workload.has_aux,
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


def with_splits(options: Options, open_order: Problem, problem: Problem, whole: Answer) -> tuple[Problem, Answer]:
    """Cuts layers in two where that makes the plan faster. Nothing runs: that it keeps the bits is assumed.

    Args:
        options: name the model, which is traced again.
        open_order: the problem as it was asked.
        problem: with whole layers, and the order of the answer.
        whole: the answer to it.
    """
    cluster, decision = problem.cluster, whole.decision
    if cluster is None or decision is None or not crowded(_planned(problem, decision)):
        return problem, whole
    start_s = time.perf_counter()
    traced, cut = traced_model(options)

    def plan(traced: Traced) -> CutCandidate:
        optimizer = cut(traced)
        finer = replace(
            open_order, costs=estimate(traced, cluster, optimizer, options.microbatches, split=splits(options))
        )
        return CutCandidate(traced, optimizer, ask(whole.planner, finer))

    begin = CutCandidate(traced, cut(traced), _planned(problem, decision))
    best = Splitter(cluster.device, lambda *_: True).better(begin, plan)
    problem, decision = best.planned.problem, best.planned.decision
    planning_s = whole.planning_s + time.perf_counter() - start_s
    evaluation = evaluate(problem, decision)
    return problem, Answer(whole.planner, planning_s, decision, evaluation, splits=best.traced.splits)


def _planned(problem: Problem, decision: Decision) -> Planned:
    return Planned(decision.plan(problem.costs, problem.schedule.name, "jvpipe"), problem, decision)


def asked(problem: Problem, names: Sequence[str]) -> list[Answer]:
    """The answers of planners, the best one first."""
    return best_first(problem, [answer(problem, name) for name in names])


def searched(problem: Problem) -> tuple[Problem, list[Answer]]:
    """The problem with the order of tasks that was found, and the answer to it."""
    start_s = time.perf_counter()
    try:
        planned = ask("jvpipe", problem)
    except Infeasible as infeasible:
        return problem, [Answer("jvpipe", time.perf_counter() - start_s, infeasible=infeasible)]
    planning_s, evaluation = time.perf_counter() - start_s, evaluate(planned.problem, planned.decision)
    return planned.problem, [Answer("jvpipe", planning_s, planned.decision, evaluation)]


def answer(problem: Problem, planner: str) -> Answer:
    """Asks a planner, and looks at the clock."""
    start_s = time.perf_counter()
    try:
        decision = find_planner(planner).decide(problem)
    except Infeasible as infeasible:
        return Answer(planner, time.perf_counter() - start_s, infeasible=infeasible)
    planning_s = time.perf_counter() - start_s
    return Answer(planner, planning_s, decision, evaluate(problem, decision))


def _show(problem: Problem, answers: Sequence[Answer], bound_s: float) -> None:
    """Prints one answer whole, several side by side."""
    console, first = Console(width=160), answers[0]
    if len(answers) > 1:
        console.print(comparison(problem, answers))
    elif first.decision is not None and first.evaluation is not None:
        console.print(stage_table(problem, first.decision, first.evaluation))
        console.print(summary(problem, first, bound_s), highlight=False)
        for reason in cut_reasons(problem, first.decision):
            console.print(reason, highlight=False)
    if not first.fits(problem):
        print("no plan:", why_not(problem, answers), file=sys.stderr)


def _write(options: Options, problem: Problem, answers: Sequence[Answer], bound_s: float) -> None:
    """Writes all answers as JSON, and pictures of the first."""
    if options.json is not None:
        documents = [as_json(problem, each, bound_s) for each in answers]
        with writing("--json", options.json) as path:
            path.write_text(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2) + "\n")
    decision = answers[0].decision
    if decision is None or (options.timeline is None and options.figure is None):
        return
    simulated = forecast(problem, decision)
    if options.timeline is not None:
        with writing("--timeline", options.timeline) as path:
            timeline.write(path, list(simulated.spans()))
    if options.figure is not None:
        title = f"{options.model or options.graph}, {problem.schedule.name}, {answers[0].planner}"
        with writing("--figure", options.figure) as path:
            timeline_figure(simulated, path, problem.memory_limit_bytes, title)
