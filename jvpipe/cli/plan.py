"""`python -m jvpipe.plan`: plans a model at its real size, or a profiled graph, without running anything."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from jvpipe.cli.command_line import parsed
from jvpipe.cli.job import keep_compiled
from jvpipe.cli.outputs import writing
from jvpipe.cli.own_model import find_model
from jvpipe.cli.plan_options import Options, check, read_import
from jvpipe.cli.speech import progress
from jvpipe.cli.train_options import fields_of
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.exports.beside import beside, judged
from jvpipe.exports.registry import find_format
from jvpipe.planners.model.problem import Problem
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules import find_schedule
from jvpipe.session.arguments import USUAL_MICROBATCHES, USUAL_STAGES
from jvpipe.session.forecasts import Forecast, asked, plan_for
from jvpipe.session.question import on_cluster, profile_slowness
from jvpipe.util.sizes import limits_of_each, parse_limits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for a user's mistake, 1 if no plan fits."""
    try:
        options = parsed(Options, arguments, "jvpipe.plan")
        names = check(options)
        forecast = _planned(options, names)
    except (ValueError, OSError) as mistake:
        return _error(mistake)
    piped = options.export is not None and not options.export.partition(":")[2]
    forecast.show(Console(width=160, stderr=piped))  # what is exported is alone on stdout
    if not forecast.fits:
        print("no plan:", forecast.why_not(), file=sys.stderr)
    try:
        _write(options, forecast)
        _exchange(options, forecast)
    except (ValueError, OSError) as mistake:
        return _error(mistake)
    return 0 if forecast.fits else 1


def _planned(options: Options, names: Sequence[str]) -> Forecast:
    """What planners answer; while a compiler is asked, how far it is."""
    if options.graph is not None:
        return of_graph(options, names)
    if not options.compile:
        return of_model(options, names)
    keep_compiled()
    with progress():
        return of_model(options, names)


def _error(mistake: Exception) -> int:
    print("error:", *str(mistake).splitlines(), file=sys.stderr)
    return 2


def of_model(options: Options, names: Sequence[str]) -> Forecast:
    """What planners answer for a model at its real size."""
    workload = find_model(str(options.model), options.size, fields_of(options))
    return plan_for(
        workload.loss_fn,
        workload.init,
        workload.abstract_batch(options.batch_size or workload.batch_size),
        options.stages,
        devices=options.devices,
        replicas=options.replicas,
        cuts=options.cuts,
        hardware=options.hardware or "a100-40gb",
        memory_limit=options.memory_limit,
        microbatches=options.microbatches,
        schedule=options.schedule,
        planner=names,
        optimizer=workload.optimizer(workload.steps),
        model_state=workload.initial_state(),
        has_aux=workload.has_aux,
        has_state=workload.has_state,
        stacked=options.stacked,
        frozen=options.frozen,
        compile=options.target or options.compile,
        title=workload.title,
    )


def of_graph(options: Options, names: Sequence[str]) -> Forecast:
    """What planners answer for a profile of a model, under its limit and over its links unless others are given."""
    cluster = None if options.hardware is None else find_cluster(options.hardware)
    schedule, file = find_schedule(options.schedule), read_graph(str(options.graph))
    stages, microbatches = (
        options.stages or USUAL_STAGES,
        options.microbatches or USUAL_MICROBATCHES,
    )
    schedule.warn_of_idle(stages, microbatches)
    limits = limits_of_each(parse_limits(options.memory_limit) or file.memory_limit_bytes, stages)
    problem = Problem(
        file.costs, schedule.stages_on(stages), schedule, microbatches, peer=file.link
    )
    slowness = profile_slowness(cluster, stages, len(file.costs.layers))
    problem = problem.told_apart(slowness, limits)
    return asked(
        problem if cluster is None else on_cluster(problem, cluster), names, str(options.graph)
    )


def _exchange(options: Options, forecast: Forecast) -> None:
    """Writes the plan for another system, and puts the layout of another one beside it."""
    if options.import_ is not None:
        if forecast.problem.replicated or forecast.problem.costs.outline is None:
            raise ValueError(f"--import {options.import_} is for a --model with a device per stage")
        format, text = read_import(options.import_)
        try:
            plan = find_format(format).load(text, forecast.problem.costs.outline)
        except ValueError as mistake:
            raise ValueError(f"--import {options.import_}: {mistake}") from None
        theirs, ours = (judged(forecast.problem, each) for each in (plan, forecast.plan))
        print(beside(format, theirs, ours))
    if options.export is not None and forecast.fits:
        format, _, file = options.export.partition(":")
        text = forecast.plan.export(format, options.lossy)
        if not file:
            print(text, end="")
            return
        with writing("--export", file) as path:
            path.write_text(text)


def _write(options: Options, forecast: Forecast) -> None:
    """Writes all answers as JSON, and pictures of the first."""
    if options.json is not None:
        with writing("--json", options.json) as path:
            path.write_text(json.dumps(forecast.to_json(), indent=2) + "\n")
    if not forecast.simulated:
        return
    if options.timeline is not None:
        with writing("--timeline", options.timeline) as path:
            forecast.timeline(path)
    if options.figure is not None:
        with writing("--figure", options.figure) as path:
            forecast.figure(path)
