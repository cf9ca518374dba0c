"""The options of a pipeline, each defined once with its type, default, unit, check and help.

The calls `Pipeline` and `plan_for`, both commands, their files and docs/options.md use these
definitions. A new option is a new field of `PipelineOptions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.targets import Target, find_target
from jvpipe.ir.reductions import AuxReduction, StateReduction, checked_reduction
from jvpipe.papers.registry import find_planner
from jvpipe.planners.user_fates import MODES
from jvpipe.runtime.engine.meshes import checked_sharding
from jvpipe.session.arguments import (
    checked_fates,
    checked_name,
    checked_replicas,
    checked_schedule,
    checked_speeds,
    checked_stacked,
    checked_stages,
    one_of,
    read_whole_numbers,
    whole_number,
)
from jvpipe.util.brief import brief
from jvpipe.util.given import checked_flag, checked_frozen
from jvpipe.util.option import (
    CALLS,
    COMMANDS,
    EVERY,
    PIPELINE,
    PLAN_FOR,
    PLANS,
    RUNS,
    Taker,
    option,
    options_of,
)
from jvpipe.util.sizes import parse_bytes, parse_limits

MOST_PLACES = 10**5
"""The largest number of stages, devices or micro-batches. A simulation has a task for each stage
and micro-batch, so larger numbers would take hours."""


def checked_target(name: str, value: Any) -> Target | bool:
    """Checks the option `compile`, which is a bool or the name of hardware to compile for."""
    if isinstance(value, str):
        return find_target(value)
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} must be True, or the name of a target such as 'h100', not {brief(value)}"
        )
    return value


_COUNT = partial(whole_number, most=MOST_PLACES)
flag_option = partial(option, False, checked_flag)
"""Defines an option that is off by default."""


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline, for calls, commands and files.

    A field's type is the type in a file. A Python call may also pass any other type that the
    option's check accepts, such as a `Cluster` for `hardware`.
    """

    # Fields have the order of the help and of the page of options, by group. The arguments of
    # `option` are default, check, help, group, unit, takers, and the effect on a resumed run.
    #
    # A field's type may differ from the type that its check returns: `stages` is a number in a
    # file, and may be a `Plan` in a call. A default of None is not checked. It lets a planner
    # decide, or means that there is no value.

    taker: ClassVar[Taker] = EVERY
    """The calls and commands that have these options."""

    stages: int | None = option(
        None,
        partial(checked_stages, largest=MOST_PLACES),
        "How many stages the model is cut into; each runs on one device, or on as many as "
        "--replicas says. If left out, 2; with --replicas auto, and in the plan command "
        "with --devices, the planner decides.",
        "pipeline",
        "stages",
        EVERY,
        "plans",
    )
    replicas: str | None = option(
        None,
        checked_replicas,
        "How many devices each stage has, such as 2,1. With auto, the planner decides "
        "this and the number of stages.",
        "pipeline",
        "devices",
        EVERY,
        "plans",
    )
    devices: int | None = option(
        None,
        _COUNT,
        "How many devices all stages have together; a stage may get several. If left out, "
        "as many as --replicas takes, else all of --hardware, else all of this machine "
        "(one per core if they are CPUs).",
        "pipeline",
        "devices",
        COMMANDS | PLAN_FOR,
        "plans",
    )
    microbatches: int | None = option(
        None,
        _COUNT,
        "How many parts a batch is split into. If left out, 4; in the plan command with "
        "--devices or --replicas, the planner decides.",
        "pipeline",
        "micro-batches",
        EVERY,
        "plans",
    )
    cuts: str | None = option(
        None,
        read_whole_numbers,
        "How many layers each stage has, such as 10:4; if left out, the planner decides.",
        "pipeline",
        "layers",
        PLANS,
    )
    schedule: str = option(
        "1f1b",
        checked_schedule,
        "The order in which micro-batches run.",
        "pipeline",
        "",
        EVERY,
        "plans",
    )
    planner: str = option(
        "jvpipe",
        # The value stays a name, which can be saved; users of the option call `find_planner` again.
        lambda said, value: find_planner(checked_name(said, value, "jvpipe")).name,
        "How layers are spread over stages.",
        "pipeline",
        "",
        COMMANDS | PIPELINE,
        "plans",
    )
    hardware: str | None = option(
        None,
        lambda said, value: (
            value if isinstance(value, Cluster) else find_cluster(checked_name(said, value, "h100"))
        ),
        "A cluster, by name or as a TOML file. If left out, a100-40gb for a model; "
        "infinitely fast links for a graph.",
        "pipeline",
        "",
        PLANS,
    )
    stacked: str | None = option(
        None,
        checked_stacked,
        "How the optimizer sees layers that the model scans over: with per_layer one by "
        "one, else as stacked arrays.",
        "pipeline",
        "",
        EVERY,
    )
    frozen: tuple[str, ...] = option(
        (),
        checked_frozen,
        'A pattern of the paths of parameters that are not trained, such as "base/*"; may be given several times.',
        "pipeline",
        "pattern",
        EVERY,
    )
    speeds: tuple[float, ...] | None = option(
        None,
        checked_speeds,
        "The relative speed of each device; measured if left out.",
        "pipeline",
        "",
        PIPELINE,
    )
    sharding: Mapping[str, PartitionSpec] | None = option(
        None,
        checked_sharding,
        "How parameters lie over the axes of meshes, by patterns of their paths.",
        "pipeline",
        "",
        PIPELINE,
    )
    batch_axis: str | None = option(
        None,
        partial(checked_name, usual="data"),
        "The axis of the meshes along which the examples of a micro-batch are cut.",
        "pipeline",
        "",
        PIPELINE,
    )
    has_aux: bool = flag_option(
        "The loss also returns auxiliary values.",
        "model",
        "",
        CALLS,
    )
    has_state: bool = flag_option(
        "The loss takes and returns a model state, such as statistics of batch norms.",
        "model",
        "",
        CALLS,
    )
    deferred_batch_norm: bool = flag_option(
        "Running statistics of batch norms change once per batch, not with each micro-batch.",
        "model",
        "",
        PIPELINE,
    )
    aux_reduce: Mapping[str, str] | None = option(
        None,
        partial(checked_reduction, kind=AuxReduction),
        "How leaves of aux are reduced over micro-batches and replicas, by patterns of "
        "their paths.",
        "model",
        "",
        PIPELINE,
    )
    model_state_reduce: Mapping[str, str] | None = option(
        None,
        partial(checked_reduction, kind=StateReduction),
        "How leaves of the model state are reduced over replicas, by patterns of their paths.",
        "model",
        "",
        PIPELINE,
    )
    compile: bool = option(
        False,
        checked_target,
        "Asks the hardware's compiler how many bytes the programs take; the hardware need "
        "not be here. Planning goes on until a plan keeps the limit by the compiler's count.",
        "memory",
        "",
        PLANS,
    )
    memory_limit: str | None = option(
        None,
        # The messages of `parse_limits` already name the memory limit.
        lambda said, value: parse_limits(value),
        "How much each device may hold, such as 16GiB, or 24GiB,11GiB for two devices. If "
        "left out, the memory that each device reports, if it reports any.",
        "memory",
        "bytes",
        EVERY,
        "plans",
    )
    host_memory_limit: str | None = option(
        None,
        lambda said, value: parse_bytes(value, said),
        "How much host memory the swapped values of all devices may take together.",
        "memory",
        "bytes",
        RUNS,
        "plans",
    )
    checkpoint: str | None = option(
        None,
        one_of("checkpoint", MODES),
        f"Which micro-batches are computed again from their stage's input: {', '.join(MODES)}.",
        "memory",
        "",
        RUNS,
        "plans",
    )
    fates: Mapping[str, str] | None = option(
        None,
        partial(
            checked_fates, of="tensors, such as {'*/attention/*': 'swap'} or \"*/attention/*=swap\""
        ),
        "What happens to tensors between a forward and its backward: keep, swap or "
        "recompute, by patterns of their names.",
        "memory",
        "",
        PIPELINE,
    )
    state_fates: str | None = option(
        None,
        partial(checked_fates, of="parameters, such as {'*': 'swap'} or \"*=swap\""),
        "Where the optimizer's state lies between updates, by patterns of the paths of "
        "parameters, such as *=swap; several are separated by commas. If left out, the "
        "planner decides under a memory limit.",
        "memory",
        "PATTERN=FATE",
        EVERY,
        "plans",
    )
    whole_layers: bool = flag_option(
        "Recomputes whole layers, each by the program that ran its forward before. Results then "
        "do not depend on fates on any platform, since each layer has the same programs under all "
        "of them. On CPUs, results never depend on fates.",
        "memory",
        "",
        EVERY,
        "plans",
    )
    group: bool | None = option(
        None,
        checked_flag,
        "Runs consecutive layers of a stage as one program; on CPUs, results are bitwise "
        "identical. If left out, only on CPUs, once a run has spent as long in steps "
        "as in compiling its programs.",
        "run",
        "",
        RUNS,
    )
    grad_norm: bool = flag_option(
        "Also reports the global norm of the gradient.",
        "run",
        "",
        PIPELINE,
    )
    remeasure: bool = flag_option(
        "Measures layers again; else the measurements of an earlier run of the same model "
        "on this machine are used.",
        "run",
        "",
        RUNS,
        "start",
    )


def checked(taker: Taker, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked value of each option of a Python call, by name.

    Args:
        taker: the call.
        arguments: the call's arguments by name; other entries are ignored.

    Raises:
        ValueError: an option has a value that is not allowed.
    """
    options = options_of(PipelineOptions).items()
    return {
        name: one.checked(name, arguments[name]) for name, one in options if taker in one.takers
    }


def passed(options: PipelineOptions, taker: Taker) -> dict[str, Any]:
    """Returns, by name, a command line's options that a Python call takes, too."""
    # Options that no command takes are left out: a command line cannot set them, and commands pass
    # their own values for some of them, such as `has_aux`.
    every_option = options_of(PipelineOptions).items()
    return {
        name: getattr(options, name)
        for name, one in every_option
        if taker in one.takers and one.takers & COMMANDS
    }
