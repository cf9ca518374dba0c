"""The options of a pipeline, checked, and what of them all processes of a run must have alike."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import Any

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Peak
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding
from jvpipe.papers.registry import find_planner, shape_planners
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
    checked_devices,
)
from jvpipe.session.inner_axes import inner_axes
from jvpipe.session.measuring import check_speeds, device_limits
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
        stages: the devices that the pipeline passes, or a plan for the first model's layers; None where `shares` has
            their number decided.
        planner: the name of what chooses cuts and fates.
        limits: in bytes, what each device may hold; none: there is no limit.
        host_limit_bytes: for swapped and parked values on the host.
        fates: of tensors, by patterns of their names.
        checkpoint: torchgpipe's mode.
        devices: the distinct ones.
        places: the device of each stage, as an index; empty if a plan was given.
        replicas: of each stage all devices, if one has several.
        shares: how many devices each stage has is decided.
        sharding: how parameters lie over the devices of a place, if there are several.
        reductions: what is said of leaves of aux and of the model state.
        grad_norm: also report the global norm of the gradient.
        remeasure: measure anew what an earlier process has measured.
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
    replicas: tuple[tuple[int, ...], ...]
    shares: bool
    sharding: Sharding | None
    reductions: Reductions
    grad_norm: bool
    remeasure: bool
    group: bool
    hosts: Hosts | None
    speeds: tuple[float, ...]

    def __str__(self) -> str:
        loss = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        how = f"{self.microbatches} micro-batches, {self.schedule.name}, planner {self.planner}"
        return f"{loss}, {how}, {len(self.devices)} devices"


# How options become settings: what each says with the others, and the devices that they come to.


def settings_of(loss_fn: Any, optimizer: Any, devices: Any, told: dict[str, Any]) -> Settings:
    """The settings of a pipeline.

    Args:
        loss_fn: as the user gave it.
        optimizer: likewise.
        devices: likewise.
        told: what its options mean, by name.

    Raises:
        ValueError: they cannot be together, with each other or with the devices that there are.
    """
    check_functions(loss_fn, optimizer, has_state=told["has_state"])
    take, schedule, planner = told.pop, told["schedule"], told["planner"]
    reductions = Reductions(take("aux_reduce") or {}, take("model_state_reduce") or {})
    _check_leaves(reductions, has_aux=told["has_aux"], has_state=told["has_state"])
    microbatches = take("microbatches") or USUAL_MICROBATCHES
    replicas, stages = take("replicas"), take("stages")
    shares = shares_devices(replicas, stages, planner)
    stages = stages_under(stages, schedule, microbatches, shares=shares)
    if not isinstance(stages, Plan):
        check_chooser(schedule, planner)
    counts = None if stages is None or shares else replica_counts(replicas, stages, schedule)
    given, laid = inner_axes(devices, take("sharding"), take("batch_axis"), replicas)
    used, places = place(stages, given, schedule, counts, shares=shares)
    planned = stages.device_count if isinstance(stages, Plan) and devices is None else len(used)
    check_speeds(speeds := take("speeds") or (), planned)
    hosts = present_hosts()
    group = take("group")
    if group is None:
        group = used[0].platform != "cpu"
    return Settings(
        loss_fn=loss_fn,
        optimizer=optimizer,
        stages=stages,
        microbatches=microbatches,
        limits=device_limits(take("memory_limit"), used, planned, hosts),
        host_limit_bytes=take("host_memory_limit"),
        speeds=speeds,
        fates=take("fates") or {},
        state_fates=take("state_fates") or {},
        devices=used,
        places=places,
        hosts=hosts,
        replicas=() if counts is None else replicas_at(counts),
        shares=shares,
        sharding=laid,
        group=group
        and laid
        is None,  # how arrays lie within a group of devices is told of each layer's programs
        reductions=reductions,
        **told,
    )


def _check_leaves(reductions: Reductions, *, has_aux: bool, has_state: bool) -> None:
    """Raises ValueError for reductions of leaves that no loss returns."""
    for given, has, option, flag in (
        (reductions.aux, has_aux, "aux_reduce", "has_aux"),
        (reductions.state, has_state, "model_state_reduce", "has_state"),
    ):
        if given and not has:
            raise ValueError(
                f"{option} is given, but the loss returns nothing of that kind: say {flag}=True"
            )


def shares_devices(
    replicas: str | tuple[int, ...] | None, stages: int | Plan | None, planner: str
) -> bool:
    """Whether how many devices each stage has is to be decided.

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
    """The number of stages, or a plan, as a schedule runs them; None where that is to be decided.

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


def place(
    stages: int | Plan | None,
    devices: Any,
    schedule: Schedule,
    replicas: Sequence[int] | None,
    *,
    shares: bool,
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's first one among them, if they are known.

    Args:
        stages: their number, or a plan; None: it is to be decided.
        devices: given for these.
        schedule: says which stages share a device.
        replicas: how many devices each stage takes, if some take several.
        shares: that is to be decided.
    """
    if stages is None or shares:
        return place_shared(stages, devices)
    return (
        place_replicas(replicas, devices, schedule)
        if replicas
        else place_stages(stages, devices, schedule)
    )


def place_shared(
    stages: int | Plan | None, devices: Any
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The devices that stages are to share, of which none has a stage yet.

    Args:
        stages: their number, if that is given.
        devices: given, all different.
    """
    given = checked_devices(devices)
    _check_different(given)
    if isinstance(stages, int) and stages > len(given):
        raise ValueError(
            f"{stages} stages need {stages} devices, there are {len(given)}: use at most {len(given)} stages"
        )
    return tuple(given), ()


def place_stages(
    stages: int | Plan, devices: Any, schedule: Schedule
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's device among them.

    Devices that are given stay, used or not: a later plan may have more stages.

    Args:
        stages: the devices that the pipeline passes, or a plan.
        devices: given for these.
        schedule: says which stages share a device.
    """
    given = checked_devices(devices)
    if devices is None:
        given = [*dealt(stages.device_count if isinstance(stages, Plan) else stages, given), *given]
    distinct = tuple(dict.fromkeys(given))
    if isinstance(stages, Plan):
        return distinct, ()
    there = len(distinct if devices is None else given)
    if stages > there:
        raise ValueError(
            f"{stages} stages need {stages} devices, there are {there}: use at most {there} stages, "
            "or share devices by naming them more than once in devices="
        )
    used = tuple(dict.fromkeys(given[:stages])) if devices is None else distinct
    places = [schedule.device_of(stage, stages) for stage in range(schedule.stages_on(stages))]
    return used, tuple(used.index(given[place]) for place in places)


def replica_counts(
    counts: tuple[int, ...] | None, stages: int | Plan, schedule: Schedule
) -> tuple[int, ...] | None:
    """The devices of each stage; None if every stage has one.

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


def place_replicas(
    replicas: Sequence[int], devices: Any, schedule: Schedule
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The devices, and the index of the first one of each stage among them: in their order, stage by stage.

    Args:
        replicas: how many each place of the pipeline takes.
        devices: given for them, all different.
        schedule: says which stages share a place.

    Raises:
        ValueError: there are too few, or one is named twice.
    """
    given = checked_devices(devices)
    _check_different(given)
    if sum(replicas) > len(given):
        raise ValueError(
            f"replicas={tuple(replicas)} need {sum(replicas)} devices, there are {len(given)}: use fewer replicas or "
            "stages"
        )
    used = given[: sum(replicas)] if devices is None else given
    firsts, places = [first for first, *_ in replicas_at(replicas)], len(replicas)
    stages = range(schedule.stages_on(places))
    return tuple(used), tuple(firsts[schedule.device_of(s, places)] for s in stages)


def _check_different(devices: Sequence[Device]) -> None:
    """Raises ValueError if a device is named twice."""
    if twice := next((device for i, device in enumerate(devices) if device in devices[:i]), None):
        raise ValueError(
            f"device {twice} is named twice: where stages are replicated each replica needs one of its own"
        )


def replicas_at(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The indices of the devices of each stage.

    >>> replicas_at((2, 1))
    ((0, 1), (2,))
    """
    return tuple(tuple(range(a, b)) for a, b in pairwise([0, *accumulate(replicas)]))


def dealt(stages: int, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices of all processes in the order in which stages take them: a block of stages for each process.

    Raises:
        ValueError: there are fewer stages than processes, or a process has fewer devices than its block has stages.
    """
    processes = list(dict.fromkeys(device.process_index for device in devices))
    if len(processes) == 1:
        return tuple(devices)
    if stages < len(processes):
        raise ValueError(
            f"{stages} stages are too few for {len(processes)} processes: use at least as many stages, or fewer "
            "processes"
        )
    left = {process: [d for d in devices if d.process_index == process] for process in processes}
    order = []
    for s in range(stages):
        process = processes[s * len(processes) // stages]
        if not left[process]:
            block = sum(
                i * len(processes) // stages == processes.index(process) for i in range(stages)
            )
            raise ValueError(
                f"{stages} stages in blocks over {len(processes)} processes need {block} devices of process {process}: "
                "use fewer stages, or more processes"
            )
        order.append(left[process].pop(0))
    return tuple(order)


# What all processes of a run must have alike, part by part, so that a difference can be named.

Tree = Any
Parts = list[tuple[str, str]]
"""The name of each part, and a text that is equal where the part is: one thought per line."""


def versions() -> Parts:
    """The versions of what computes."""
    names = ("jax", "jaxlib", "jvpipe")
    return [*((name, version(name)) for name in names), ("python", platform.python_version())]


def option_parts(settings: Settings) -> Parts:
    """The options of a pipeline, but for its functions, which are compared once they are traced."""
    apart = ("loss_fn", "optimizer", "hosts")
    names = [each.name for each in fields(settings) if each.name not in apart]
    told = {name: getattr(settings, name) for name in names}
    stages, schedule = settings.stages, settings.schedule
    told |= {
        "stages": stages.to_json() if isinstance(stages, Plan) else stages,
        "schedule": schedule.name,
        "options of the schedule": schedule.options,
        "memory_limit": told.pop("limits"),
        "host_memory_limit": told.pop("host_limit_bytes"),
        "devices": [device.device_kind for device in settings.devices],
    }
    return [*versions(), *((name, without_addresses(str(value))) for name, value in told.items())]


def agree_on_given(
    hosts: Hosts, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree
) -> None:
    """Makes sure that all processes begin a run with the same.

    Of parameters and model state every byte is compared, of parameters that a function makes how it makes each; of
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
    given: Parts = [
        ("the key", "None" if rng is None else f"{rng.dtype} {array_digest(rng)}"),
        ("the batch", "\n".join(shapes)),
        ("parameters", "\n".join(parameters)),
        ("model state", "\n".join(leaf_lines(model_state, "leaf of the model state"))),
    ]
    hosts.agree("what init is given", given)
    own = leaf_lines(jax.tree.map(_unread, batch), "batch leaf")
    every = [json.loads(told) for told in hosts.exchange("batch", json.dumps(own).encode())]
    by_all = [i for i, shape in enumerate(shapes) if all(lines[i] != shape for lines in every)]
    hosts.agree(
        "what init is given", [("the values of the batch", "\n".join(own[i] for i in by_all))]
    )


def _unread(leaf: Any) -> Any:
    """A leaf as it is, of one that is read lazily the shape: whoever needs nothing of it is not to read it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, LazyArray) else leaf


def agreed_rows(compiled: CompiledPlan) -> Parts:
    """The lowered rows, once they are bound."""
    return [(f"rows {i}", "\n".join(rows)) for i, rows in enumerate(compiled.whole_rows)]


def told_peaks(hosts: Hosts, own: Sequence[Peak]) -> list[Peak]:
    """The most bytes on each device, and last on the host, as the processes that have them tell.

    Args:
        hosts: the processes.
        own: what this one knows; nothing of the others' devices.
    """
    told = [
        json.loads(each)
        for each in hosts.exchange("peaks", json.dumps([peak.bytes for peak in own]).encode())
    ]
    return [Peak(max(sizes), None, ()) for sizes in zip(*told, strict=True)]
