"""The options of a pipeline, checked, and what of them all processes of a run must have alike."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Peak
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding
from jvpipe.papers.registry import FateRule, find_planner, shape_planners
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import Hosts, present_hosts
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules import Schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    check_chooser,
    check_functions,
    check_speeds,
)
from jvpipe.session.devices import device_limits, host_limit, inner_axes, place, replicas_at
from jvpipe.trace.digests import (
    array_digest,
    leaf_lines,
    made_lines,
    shape_lines,
    without_addresses,
)
from jvpipe.trace.leaves import is_initialiser


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained and how, wherever its stages lie.

    Args:
        loss_fn: the loss of the first model.
        optimizer: as it was given.
        microbatches: how many a batch is split into.
        schedule: in which order they run.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state.
        stacked: "per_layer" if the optimizer sees slices of the layers that a scan stacks, None if arrays.
        frozen: patterns of parameters that nothing updates.
        state_fates: of the optimizer's state, by patterns of the paths of parameters.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    microbatches: int
    schedule: Schedule
    has_aux: bool = False
    has_state: bool = False
    stacked: str | None = None
    frozen: tuple[str, ...] = ()
    state_fates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """The options of a `jvpipe.Pipeline`, as they hold for every model that it trains.

    Args:
        stages: the devices that the pipeline passes, or a plan for the first model's layers; None if `shares` has
            their number decided.
        planner: the name of what chooses cuts and fates.
        limits: in bytes, what each device may hold; none: there is no limit.
        host_limit_bytes: for swapped and parked values on the host.
        fates: of tensors, by patterns of their names.
        checkpoint: torchgpipe's mode.
        devices: the distinct ones.
        places: the device of each stage, as an index; empty if a plan was given.
        splits_unasked: `microbatches` was left out, so batches are split although nobody asked for it.
        replicas: of each stage all devices, if one has several.
        shares: how many devices each stage has is decided.
        sharding: how parameters lie over the devices of a place, if there are several.
        reductions: given for leaves of aux and of the model state.
        grad_norm: also report the global norm of the gradient.
        remeasure: measure again what an earlier process has measured.
        group: consecutive layers of a stage run as one program.
        hosts: the processes of the run, if there are several.
        speeds: how fast each device is beside the others; none: what is measured tells.
    """

    stages: int | Plan | None
    planner: str
    limits: tuple[int, ...]
    host_limit_bytes: int | None
    fates: Mapping[str, str]
    checkpoint: str | None
    devices: tuple[Device, ...]
    places: tuple[int, ...]
    splits_unasked: bool
    replicas: tuple[tuple[int, ...], ...]
    shares: bool
    sharding: Sharding | None
    reductions: Reductions
    grad_norm: bool
    remeasure: bool
    group: bool
    hosts: Hosts | None
    speeds: tuple[float, ...]

    @property
    def chooses_fates(self) -> bool:
        """Whether the planner chooses fates: one that does, under a limit."""
        return bool(self.limits) and find_planner(self.planner).chooses_fates

    @property
    def asks_fates(self) -> bool:
        """Whether it matters what layers take that do not keep everything: it is chosen, or all is computed again."""
        return self.chooses_fates or find_planner(self.planner).fate_rule is FateRule.RECOMPUTES

    def __str__(self) -> str:
        loss = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        how = f"{self.microbatches} micro-batches, {self.schedule.name}, planner {self.planner}"
        return f"{loss}, {how}, {len(self.devices)} devices"


# How options become settings: what each says with the others, and the devices that they come to.


def settings_of(loss_fn: Any, optimizer: Any, devices: Any, options: dict[str, Any]) -> Settings:
    """Returns the settings of a pipeline.

    Args:
        loss_fn: as the user gave it.
        optimizer: as the user gave it.
        devices: as the user gave them.
        options: what its options mean, by name.

    Raises:
        ValueError: they cannot be together, with each other or with the devices that there are.
    """
    check_functions(loss_fn, optimizer, has_state=options["has_state"])
    take, schedule, planner = options.pop, options["schedule"], options["planner"]
    reductions = Reductions(take("aux_reduce") or {}, take("model_state_reduce") or {})
    _check_leaves(reductions, has_aux=options["has_aux"], has_state=options["has_state"])
    asked = take("microbatches")
    microbatches = asked or USUAL_MICROBATCHES
    replicas, stages = take("replicas"), take("stages")
    shares = shares_devices(replicas, stages, planner)
    stages = stages_under(stages, schedule, microbatches, shares=shares)
    if not isinstance(stages, Plan):
        check_chooser(schedule, planner)
    counts = None if stages is None or shares else replica_counts(replicas, stages, schedule)
    groups, laid = inner_axes(devices, take("sharding"), take("batch_axis"), replicas)
    used, places = place(stages, groups, schedule, counts, shares=shares)
    # Devices beyond those of the plan are there for later plans, without speeds of their own.
    planned = stages.device_count if isinstance(stages, Plan) and devices is None else len(used)
    check_speeds(speeds := take("speeds") or (), planned)
    hosts = present_hosts()
    # Over a mesh each layer's programs say how its arrays lie.
    group = take("group") and laid is None
    return Settings(
        loss_fn=loss_fn,
        optimizer=optimizer,
        stages=stages,
        microbatches=microbatches,
        splits_unasked=asked is None,
        limits=device_limits(take("memory_limit"), used, planned, hosts),
        host_limit_bytes=host_limit(take("host_memory_limit"), used),
        speeds=speeds,
        fates=take("fates") or {},
        state_fates=take("state_fates") or {},
        devices=used,
        places=places,
        hosts=hosts,
        replicas=() if counts is None else replicas_at(counts),
        shares=shares,
        sharding=laid,
        group=group,
        reductions=reductions,
        **options,
    )


def _check_leaves(reductions: Reductions, *, has_aux: bool, has_state: bool) -> None:
    """Raises ValueError for reductions of leaves that no loss returns."""
    for rules, returns_some, option, flag in (
        (reductions.aux, has_aux, "aux_reduce", "has_aux"),
        (reductions.state, has_state, "model_state_reduce", "has_state"),
    ):
        if rules and not returns_some:
            raise ValueError(
                f"{option} is given, but the loss returns nothing of that kind: say {flag}=True"
            )


def shares_devices(
    replicas: str | tuple[int, ...] | None, stages: int | Plan | None, planner: str
) -> bool:
    """Tells whether how many devices each stage has is to be decided.

    Args:
        replicas: "auto", or those of each stage.
        stages: their number, if that is given, or a plan.
        planner: by its name.

    Raises:
        ValueError: it cannot be decided.
    """
    if replicas != "auto":
        return False
    if isinstance(stages, Plan):
        raise ValueError(
            f"replicas='auto' is given with a plan, whose stages have {stages.replicas} devices: leave it out"
        )
    if planner not in shape_planners():
        raise ValueError(
            f"replicas='auto' is decided by planners {', '.join(shape_planners())}, not by '{planner}': name one of "
            "these, or give the devices of each stage, such as replicas=(2, 1)"
        )
    if find_planner(planner).as_paper and stages is not None:
        raise ValueError(
            f"replicas='auto' with planner '{planner}', which decides the number of stages itself: leave stages out"
        )
    return True


def stages_under(
    stages: int | Plan | None, schedule: Schedule, microbatches: int, *, shares: bool
) -> int | Plan | None:
    """Returns the number of stages, or a plan, as a schedule runs them; None if that is to be decided.

    Args:
        stages: their number or a plan, if that is given.
        schedule: in which order they run.
        microbatches: of a step.
        shares: how many devices each has is to be decided.
    """
    if isinstance(stages, Plan):
        stages = stages.under(schedule.name)
        length = pipeline_length(stages, schedule)
    elif stages is None and shares:
        length = 1
    else:
        stages = length = stages or USUAL_STAGES
    schedule.check(length, microbatches)
    schedule.warn_of_idle(length, microbatches)
    return stages


def replica_counts(
    counts: tuple[int, ...] | None, stages: int | Plan, schedule: Schedule
) -> tuple[int, ...] | None:
    """Returns the devices of each stage; None if every stage has one.

    Args:
        counts: as the user gave them.
        stages: their number, or a plan.
        schedule: in which order they run.

    Raises:
        ValueError: they are not those of the stages.
    """
    if isinstance(stages, Plan):
        if counts not in (None, stages.replicas):
            raise ValueError(
                f"replicas={counts} is given with a plan, whose stages have {stages.replicas}: leave it out"
            )
        return None
    if counts is not None and len(counts) != stages:
        raise ValueError(
            f"replicas={counts} says so of {len(counts)} stages, there are {stages}: give a number for each"
        )
    if counts is None or max(counts) == 1:
        return None
    check_replicable(schedule)
    return counts


# What all processes of a run must have alike, part by part, so that a difference can be named.

Tree = Any
Parts = list[tuple[str, str]]
"""The name of each part, and a text that is equal where the part is: one thought per line."""


def versions() -> Parts:
    """Returns the versions of what computes."""
    names = ("jax", "jaxlib", "jvpipe")
    return [*((name, version(name)) for name in names), ("python", platform.python_version())]


def option_parts(settings: Settings) -> Parts:
    """Returns the options of a pipeline except its functions, which are compared once they are traced."""
    apart = ("loss_fn", "optimizer", "hosts")
    names = [one.name for one in fields(settings) if one.name not in apart]
    # All fields: one that is added later cannot be forgotten here.
    values = {name: getattr(settings, name) for name in names}
    stages, schedule = settings.stages, settings.schedule
    values |= {
        "stages": stages.to_json() if isinstance(stages, Plan) else stages,
        "schedule": schedule.name,
        "options of the schedule": schedule.options,
        "memory_limit": values.pop("limits"),
        "host_memory_limit": values.pop("host_limit_bytes"),
        "devices": [device.device_kind for device in settings.devices],
    }
    return [*versions(), *((name, without_addresses(str(value))) for name, value in values.items())]


def agree_on_given(
    hosts: Hosts, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree
) -> None:
    """Makes sure that all processes begin a run with the same.

    Every byte of parameters and model state is compared; for parameters that a function makes, how it makes each; for
    the batch the shapes, and the bytes of the leaves that every process gives as arrays. Batches of later steps are
    not: to read them all would take longer than some steps.

    Args:
        hosts: the processes.
        params: arrays, or a function that makes them.
        batch: a batch, or its shapes.
        rng: the key of the run.
        model_state: arrays.

    Raises:
        Disagreement: something differs.
    """
    if is_initialiser(params):
        assert rng is not None
        parameters = made_lines(params, rng)
    else:
        parameters = leaf_lines(params)
    shapes = shape_lines(batch, "batch leaf")
    parts: Parts = [
        ("the key", "None" if rng is None else f"{rng.dtype} {array_digest(rng)}"),
        ("the batch", "\n".join(shapes)),
        ("parameters", "\n".join(parameters)),
        ("model state", "\n".join(leaf_lines(model_state, "leaf of the model state"))),
    ]
    hosts.agree("what init is given", parts)
    mine = leaf_lines(jax.tree.map(_unread, batch), "batch leaf")
    all_lines = [json.loads(word) for word in hosts.exchange("batch", json.dumps(mine).encode())]
    # A leaf that some process gives as a shape has no values to be compared.
    by_all = [i for i, shape in enumerate(shapes) if all(lines[i] != shape for lines in all_lines)]
    hosts.agree(
        "what init is given", [("the values of the batch", "\n".join(mine[i] for i in by_all))]
    )


def _unread(leaf: Any) -> Any:
    """Returns a leaf, or the shape of one that is read lazily: whoever needs nothing of it shall not read it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, LazyArray) else leaf


def agree_on_rows(compiled: CompiledPlan, name: str = "the rows that processes run") -> None:
    """Makes sure that all processes have lowered a plan alike, before anything crosses between them.

    Args:
        compiled: the plan.
        name: of what is compared, for the message.

    Raises:
        Disagreement: some rows differ.
    """
    if compiled.hosts is not None:
        parts = [(f"rows {i}", "\n".join(rows)) for i, rows in enumerate(compiled.whole_rows)]
        compiled.hosts.agree(name, parts)


def told_peaks(hosts: Hosts, here: Sequence[Peak]) -> list[Peak]:
    """Returns the most bytes on each device, and last on the host, as the processes that have them tell.

    Args:
        hosts: the processes.
        here: what this one knows; nothing of the others' devices.
    """
    sizes_by_process = [
        json.loads(word)
        for word in hosts.exchange("peaks", json.dumps([peak.bytes for peak in here]).encode())
    ]
    return [Peak(max(sizes), None, ()) for sizes in zip(*sizes_by_process, strict=True)]
