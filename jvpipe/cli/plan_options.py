"""The options of `python -m jvpipe.plan`, and the checks of them that need no planner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jvpipe.cli.outputs import check_figure, check_outputs
from jvpipe.cost.targets import find_target
from jvpipe.exports.registry import find_format
from jvpipe.schedules import find_schedule
from jvpipe.session.arguments import USUAL_MICROBATCHES, USUAL_STAGES, check_chooser
from jvpipe.session.forecasts import planner_names
from jvpipe.session.question import check_shape_planner
from jvpipe.util.sizes import limits_of_each, parse_limits

MOST = {
    "--stages": 10**5,
    "--devices": 10**5,
    "--microbatches": 10**5,
    "--batch-size": 10**9,
    "--sequence-length": 10**9,
}
"""Of what is counted: each micro-batch on each stage is simulated."""


@dataclass(frozen=True)
class Options:
    """Plans a model, or a graph file, over the devices of a cluster."""

    model: str | None = None
    """Which model, as `python -m jvpipe.train` takes it; its parameters are never made."""
    size: str | None = None
    """Which of its sizes; the smallest one if left out."""
    dtype: str | None = None
    """The type that the model computes in; float32 if left out."""
    sequence_length: int | None = None
    """Tokens of a record, for models that have this field or one called tokens."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE replaces a field of the model, such as blocks=12; may be given again and again."""
    graph: str | None = None
    """In place of a model: a graph.txt of PipeDream or a JSON file of dnn-partitioning."""
    stages: int | None = None
    """Over how many devices; 2 if left out. With --devices or --replicas how many stages, decided if left out."""
    devices: int | None = None
    """How many devices stages share that may have several each; as many as --replicas take, or all of --hardware."""
    replicas: str | None = None
    """How many devices each stage has, such as 3:1 or 3,1; auto to have that decided."""
    cuts: str | None = None
    """How many layers each of them has, such as 10:4; decided if left out."""
    hardware: str | None = None
    """A cluster by name or a TOML file; a100-40gb for a model, infinite links for a graph."""
    memory_limit: str | None = None
    """What each device may hold, such as 16GiB, or 24GiB,11GiB for two; for a model, what the hardware has."""
    schedule: str = "1f1b"
    """In which order the micro-batches run."""
    planner: str = "jvpipe"
    """Which planner; with --devices or --replicas jvpipe, pipedream or dapple."""
    compare: str | None = None
    """Several planners side by side: `all`, or names with commas between."""
    microbatches: int | None = None
    """Into how many parts a batch is split; 4 if left out, or decided with --devices or --replicas."""
    stacked: str | None = None
    """What the optimizer sees of layers that the model scans over: with per_layer each alone, else
    their arrays."""
    frozen: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A pattern of the paths of parameters that stay as they are, such as "base/*"; may be given again."""
    batch_size: int | None = None
    """Examples per step; the model's own if left out."""
    compile: bool = False
    """Asks the compiler of the hardware, which need not be here, how many bytes the programs take; planning goes
    on until a plan keeps the limit so."""
    target: str | None = None
    """With --compile: another device than the hardware's, such as h200 or v5e:4x4."""
    export: str | None = None
    """FORMAT[:FILE] writes the plan for another system, to stdout without a file: megatron, torchtitan,
    torch-csv, maxtext or jaxpp."""
    lossy: bool = False
    """With --export: what the format cannot say is lost, and told in a comment."""
    import_: Annotated[str | None, tyro.conf.arg(name="import")] = None
    """FORMAT:FILE simulates the layout of another system beside the plan."""
    json: str | None = None
    """Writes the plan to this file; of several planners all plans, the best first."""
    timeline: str | None = None
    """Writes the simulated timeline to this file, for Perfetto; of several planners that of the best."""
    figure: str | None = None
    """Draws that timeline, with memory under it, to this file (png, svg or pdf)."""

    @property
    def shared(self) -> dict[str, int | str]:
        """What is said of stages that may have several devices; nothing if each has one."""
        said = {"devices": self.devices, "replicas": self.replicas, "cuts": self.cuts}
        return {name: value for name, value in said.items() if value is not None}


def check(options: Options) -> list[str]:
    """The planners to be asked. Raises ValueError for what can be seen to be wrong before any work."""
    if (options.model is None) == (options.graph is None):
        raise ValueError("give one of --model and --graph")
    counts = {
        "--stages": options.stages,
        "--devices": options.devices,
        "--microbatches": options.microbatches,
        "--batch-size": options.batch_size,
        "--sequence-length": options.sequence_length,
    }
    of_models = {name: counts[name] for name in ("--batch-size", "--sequence-length")}
    of_models |= {f"--{name}": value for name, value in options.shared.items()}
    of_models |= {
        "--compile": True if options.compile else None,
        "--size": options.size,
        "--dtype": options.dtype,
        "--set": " ".join(options.set) or None,
        "--frozen": " ".join(options.frozen) or None,
    }
    for name, value in of_models.items():
        if options.graph is not None and value is not None:
            raise ValueError(f"{name} {value} is of a --model, a --graph has its own: leave it out")
    if options.target is not None:
        if not options.compile:
            raise ValueError(f"--target {options.target} is for --compile: give both")
        find_target(options.target)
    for name, count in counts.items():
        if count is not None and not 1 <= count <= MOST[name]:
            raise ValueError(f"{name} {count}: there must be 1 to {MOST[name]}")
    schedule, names = (
        find_schedule(options.schedule),
        planner_names(options.compare or [options.planner]),
    )
    for name in names:
        check_chooser(schedule, name)
    if options.shared:
        check_shape_planner(names, schedule)
    else:
        stages = options.stages or USUAL_STAGES
        schedule.check(stages, options.microbatches or USUAL_MICROBATCHES)
        limits_of_each(parse_limits(options.memory_limit), stages)
    outputs = {"--json": options.json, "--timeline": options.timeline, "--figure": options.figure}
    outputs["--export"], imported = _files(options)
    inputs = {"--graph": options.graph, "--hardware": options.hardware, "--import": imported}
    check_outputs(outputs, inputs)
    if options.figure is not None:
        check_figure(options.figure)
    return names


def _files(options: Options) -> tuple[str | None, str | None]:
    """The files of --export and --import. Raises ValueError for formats that there are not, and options without one."""
    export, _, target = (options.export or "").partition(":")
    format, _, source = (options.import_ or "").partition(":")
    for name in filter(None, (export, format)):
        find_format(name)
    if options.lossy and not export:
        raise ValueError("--lossy is for --export: give a format")
    if format and not source:
        raise ValueError(
            f"--import {options.import_}: give FORMAT:FILE, such as megatron:layout.txt"
        )
    if options.import_ is not None:
        read_import(options.import_)  # what cannot be read is told before a plan is made
    return target or None, source or None


def read_import(given: str) -> tuple[str, str]:
    """The format that --import names, and the text of its file; ValueError if there is none."""
    format, _, file = given.partition(":")
    try:
        return format, Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--import {given}: this cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"--import {given}: this is no file of text") from None
