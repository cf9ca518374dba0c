"""The command `python -m jvpipe.plan`, which plans a model or a graph file without running it."""

import errno
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from jvpipe.cli.command_line import read_options
from jvpipe.cli.command_options import (
    ModelOptions,
    check_each,
    fields_of,
    name_option,
    path_option,
)
from jvpipe.cli.job import keep_compiled, stay_on_cpus
from jvpipe.cli.outputs import check_figure, check_outputs, progress, writing
from jvpipe.cli.own_model import find_model
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.exports.beside import beside, judged
from jvpipe.exports.formats import find_format
from jvpipe.planners.model.problem import Problem
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules import find_schedule
from jvpipe.session.arguments import USUAL_MICROBATCHES, USUAL_STAGES, check_chooser
from jvpipe.session.forecast import Forecast, asked
from jvpipe.session.forecasts import plan_for, planner_names
from jvpipe.session.options import checked_target, flag_option, passed
from jvpipe.session.question import check_shape_planner, on_cluster, profile_slowness
from jvpipe.util.option import PLAN, PLAN_FOR, Taker, option, options_of
from jvpipe.util.sizes import limits_of_each, parse_limits


def read_import(flag: str, text: str) -> tuple[str, str]:
    """Returns the format and the content of the file that --import names.

    Raises:
        ValueError: the format is unknown, or the file is missing, unreadable or not text.
    """
    format, _, file = text.partition(":")
    find_format(format)
    if not file:
        raise ValueError(f"{flag} {text}: give FORMAT:FILE, such as megatron:layout.txt")
    path = Path(file)
    try:
        # The file is read twice: when the options are checked, and after planning.
        if path.is_fifo() or path.is_char_device():
            raise OSError(errno.ESPIPE, "this is not a regular file")
        return format, path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {text}: the file cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"{flag} {text}: the file is not a text file in UTF-8") from None


@dataclass(frozen=True)
class PlanOptions(ModelOptions):
    """Plans a model, or a graph file, over the devices of a cluster."""

    taker: ClassVar[Taker] = PLAN

    model: str | None = name_option(
        "The model, as for `python -m jvpipe.train`; its parameters are never allocated.",
        "model",
    )
    graph: str | None = path_option(
        "In place of a model: a graph.txt of PipeDream, or a JSON file of dnn-partitioning.",
        "model",
        "file",
    )
    compare: str | None = option(
        None,
        planner_names,
        "Compares several planners: `all`, or names separated by commas.",
        "pipeline",
        "planners",
    )
    target: str | None = option(
        None,
        checked_target,
        "With --compile: the device to compile for, such as h200 or v5e:4x4, if it is not that of "
        "the hardware.",
        "memory",
        "target",
    )
    export: str | None = option(
        None,
        lambda flag, value: find_format(value.partition(":")[0]),
        "Writes the plan for another system, to a file or to stdout. Formats: megatron, "
        "torchtitan, torch-csv, maxtext, jaxpp.",
        "run",
        "FORMAT[:FILE]",
    )
    lossy: bool = flag_option(
        "With --export: writes the nearest plan that the format can express, with a comment on "
        "what is lost.",
        "run",
    )
    import_: str | None = option(
        None,
        read_import,
        "Simulates the layout in another system's file, and compares it with the plan. The formats "
        "are those of --export.",
        "run",
        "FORMAT:FILE",
    )
    json: str | None = path_option(
        "Writes the plan to this file; with several planners, all their plans, the best first.",
        "run",
        "file",
    )
    timeline: str | None = path_option(
        "Writes the simulated timeline to this file, for Perfetto; with several planners, the "
        "timeline of the best plan.",
        "run",
        "file",
    )

    def check(self) -> list[str]:
        """Checks the options before any work is done; returns the names of the planners to ask.

        Raises:
            ValueError: an option has an impossible value or contradicts another option.
        """
        if (self.model is None) == (self.graph is None):
            raise ValueError("give one of --model and --graph")
        if self.graph is not None:
            self._refuse_options_of_models()
        if self.target is not None and not self.compile:
            raise ValueError(f"--target {self.target} needs --compile: give both")
        check_each(self)
        schedule = find_schedule(self.schedule)
        names = planner_names("--compare", self.compare or [self.planner])
        for name in names:
            check_chooser(schedule, name)
        # With one of these options, a stage may have several devices.
        if (self.devices, self.replicas, self.cuts) != (None, None, None):
            check_shape_planner(names, schedule)
        else:
            stages = self.stages or USUAL_STAGES
            schedule.check(stages, self.microbatches or USUAL_MICROBATCHES)
            limits_of_each(parse_limits(self.memory_limit), stages)
        if self.lossy and not self.export:
            raise ValueError("--lossy is for --export: give --export with a format")
        # `--export FORMAT` without a file writes to stdout, which needs no check.
        outputs = {
            "--json": self.json,
            "--timeline": self.timeline,
            "--figure": self.figure,
            "--export": (self.export or "").partition(":")[2] or None,
        }
        inputs = {
            "--graph": self.graph,
            "--hardware": self.hardware,
            "--import": (self.import_ or "").partition(":")[2],
        }
        check_outputs(outputs, inputs)
        if self.figure is not None:
            check_figure(self.figure)
        return names

    def _refuse_options_of_models(self) -> None:
        """Raises ValueError if one of the options for models is given."""
        for name in _OF_MODELS:
            if value := getattr(self, name):
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{options_of(PlanOptions)[name].flag} {shown} is for --model and cannot "
                    "change the graph file of --graph: leave it out"
                )


_OF_MODELS = (
    "compile",
    "batch_size",
    "sequence_length",
    "devices",
    "replicas",
    "cuts",
    "size",
    "dtype",
    "set",
    "frozen",
    "state_fates",
    "whole_layers",
)
"""The options that need a model and cannot be given with a graph file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code, which is 2 for a mistake and 1 if no plan fits."""
    try:
        options = PlanOptions(**read_options(PlanOptions, arguments, "jvpipe.plan"))
        names = options.check()
        forecast = _planned(options, names)
    except (ValueError, OSError) as mistake:
        return _error(mistake)
    # An exported plan without a file goes to stdout, so that it can be piped. So all other output
    # then goes to stderr.
    piped = options.export is not None and not options.export.partition(":")[2]
    forecast.show(Console(width=160, stderr=piped))
    if not forecast.fits:
        print("no plan:", forecast.why_not(), file=sys.stderr)
    try:
        _write(options, forecast)
        _exchange(options, forecast)
    except (ValueError, OSError) as mistake:
        return _error(mistake)
    return 0 if forecast.fits else 1


def _planned(options: PlanOptions, names: Sequence[str]) -> Forecast:
    """Plans the model or the graph; shows the progress if programs are compiled."""
    stay_on_cpus()
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


def of_model(options: PlanOptions, names: Sequence[str]) -> Forecast:
    """Plans a model at its real size."""
    workload = find_model(str(options.model), options.size, fields_of(options))
    arguments = passed(options, PLAN_FOR)
    arguments["compile"] = options.target or options.compile
    return plan_for(
        **workload.to_plan(options.batch_size), **arguments, planner=names, title=workload.title
    )


def of_graph(options: PlanOptions, names: Sequence[str]) -> Forecast:
    """Plans a graph file; options replace the memory limit and the link speed in the file."""
    cluster = None if options.hardware is None else find_cluster(options.hardware)
    schedule, file = find_schedule(options.schedule), read_graph(str(options.graph))
    stages = options.stages or USUAL_STAGES
    microbatches = options.microbatches or USUAL_MICROBATCHES
    schedule.warn_of_idle(stages, microbatches)
    limits = limits_of_each(parse_limits(options.memory_limit) or file.memory_limit_bytes, stages)
    # The link of the file is replaced below if --hardware is given.
    problem = Problem(
        file.costs,
        schedule.stages_on(stages),
        schedule,
        microbatches,
        peer=file.link,
    )
    slowness = profile_slowness(cluster, stages, len(file.costs.layers))
    problem = problem.told_apart(slowness, limits)
    if cluster is not None:
        problem = on_cluster(problem, cluster)
    return asked(problem, names, str(options.graph))


def _exchange(options: PlanOptions, forecast: Forecast) -> None:
    """Compares the plan with the layout of --import, and writes it in the format of --export."""
    if options.import_ is not None:
        if forecast.problem.replicated or forecast.outline is None:
            raise ValueError(
                f"--import {options.import_} needs a --model, and stages of one device each: leave "
                "out --graph, --devices and --replicas"
            )
        format, text = read_import("--import", options.import_)
        try:
            plan = find_format(format).load(text, forecast.outline)
        except ValueError as mistake:
            raise ValueError(f"--import {options.import_}: {mistake}") from None
        if forecast.fits:
            theirs = judged(forecast.problem, plan, forecast.state_s_of(plan))
            ours = judged(forecast.problem, forecast.plan, forecast.state_s)
            print(beside(format, theirs, ours))
    if options.export is not None and forecast.fits:
        format, _, file = options.export.partition(":")
        text = forecast.plan.export(format, options.lossy)
        if not file:
            print(text, end="")
            return
        with writing("--export", file) as path:
            path.write_text(text)


def _write(options: PlanOptions, forecast: Forecast) -> None:
    """Writes the plans of all planners as JSON, and the timeline and figure of the best plan."""
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
