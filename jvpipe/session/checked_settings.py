"""Turns options into settings, and chooses a device for each stage."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax

from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.papers.registry import find_planner, shape_planners
from jvpipe.runtime.engine.hosts import present_hosts
from jvpipe.runtime.engine.memory_limits import device_limits, host_limit
from jvpipe.runtime.engine.meshes import inner_axes
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules import Schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    check_chooser,
    check_deferred,
    check_functions,
    check_speeds,
)
from jvpipe.session.settings import Settings
from jvpipe.util.brief import brief
from jvpipe.util.devices import Device
from jvpipe.util.given import several

Stages = int | Plan | None
"""The number of stages (how many devices a micro-batch passes) or a plan; None if neither is given,
or if a planner decides."""
_MORE_CPUS = (
    '; for more CPU devices, call jax.config.update("jax_num_cpu_devices", {}) before anything '
    "else of JAX"
)


def checked_devices(devices: Any) -> list[Device]:
    """Checks and returns the devices that the user gives; None stands for all devices of JAX."""
    chosen = several(jax.devices() if devices is None else devices)
    if not chosen or not all(hasattr(device, "addressable_memories") for device in chosen):
        raise ValueError(
            "devices must be a list of JAX devices, one per stage, such as "
            f"[jax.devices()[i] for i in (0, 1)], not {brief(devices)}"
        )
    return chosen


def place(
    stages: Stages,
    devices: Any,
    schedule: Schedule,
    replicas: Sequence[int] | None,
    *,
    shares: bool,
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """Finds the distinct devices, and for each stage the index of its first device among them.

    All devices that the user gives are returned, used or not, because a later plan may have
    more stages. Stages take devices in order: stage 0 takes as many as it has replicas,
    then stage 1.

    Args:
        stages: how many devices a micro-batch passes, or a plan; None if a planner decides.
        devices: the devices as the user gave them.
        schedule: determines which stages share a device.
        replicas: the number of devices of each stage, if a stage has several.
        shares: whether the planner decides how many devices each stage takes.

    Returns:
        The devices and the indices. The indices are empty if a plan or a planner decides them.

    Raises:
        ValueError: there are too few devices, or two replicas would share one.
    """
    offered = checked_devices(devices)
    # Stages share a device that the user lists more than once. Replicas cannot share a device.
    if shares or replicas:
        _check_different(offered)
    elif devices is None and stages:
        count = stages.device_count if isinstance(stages, Plan) else stages
        offered = [*dealt(count, offered), *offered]
    # `dict.fromkeys` keeps the order in which stages take devices.
    distinct = tuple(dict.fromkeys(offered))
    available = len(distinct if devices is None else offered)
    if isinstance(stages, Plan) or stages is None:
        return distinct, ()
    counts = replicas or (1,) * stages
    if sum(counts) > available:
        all_are_cpus = devices is None and all(device.platform == "cpu" for device in offered)
        more = _MORE_CPUS.format(sum(counts)) if all_are_cpus else ""
        raise ValueError(_too_few(stages, available, replicas, shares=shares) + more)
    if shares:
        return distinct, ()
    used = distinct
    if devices is None:
        used = tuple(dict.fromkeys(offered[: sum(counts)]))
    firsts = [offered[at] for at in accumulate(counts[:-1], initial=0)]
    each = range(schedule.stages_on(stages))
    places = [used.index(firsts[schedule.device_of(s, stages)]) for s in each]
    return used, tuple(places)


def _too_few(stages: int, count: int, replicas: Sequence[int] | None, *, shares: bool) -> str:
    """Returns a message with the numbers of devices needed and present, and a remedy."""
    if replicas:
        return (
            f"replicas={tuple(replicas)} need {sum(replicas)} devices, there are {count}: "
            "use fewer replicas or stages"
        )
    message = (
        f"{stages} stages need {stages} devices, there are {count}: use at most {count} stages"
    )
    if not shares:
        message += ", or share devices by naming them more than once in devices="
    return message


def _check_different(devices: Sequence[Device]) -> None:
    """Raises ValueError if a device is named twice."""
    repeated = [device for i, device in enumerate(devices) if device in devices[:i]]
    if repeated:
        raise ValueError(
            f"device {repeated[0]} is named twice: where stages are replicated each replica "
            "needs a device of its own"
        )


def replicas_at(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the devices of each stage as indices, given how many devices each stage has.

    >>> replicas_at((2, 1))
    ((0, 1), (2,))
    """
    bounds = [0, *accumulate(replicas)]
    return tuple(tuple(range(first, end)) for first, end in pairwise(bounds))


def dealt(stages: int, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns devices in the order of stages: each process has a block of consecutive stages.

    With one process, all devices are returned as they are.

    Args:
        stages: how many stages there are, each on one device.
        devices: the devices of all processes.

    Raises:
        ValueError: there are fewer stages than processes, or a process has too few devices.
    """
    processes = list(dict.fromkeys(device.process_index for device in devices))
    count = len(processes)
    if count == 1:
        return tuple(devices)
    if stages < count:
        raise ValueError(
            f"{stages} stages are too few for {count} processes: use at least as many stages, or "
            "fewer processes"
        )
    # Blocks of consecutive stages make few tensors cross between processes.
    process_of = [processes[s * count // stages] for s in range(stages)]
    order = list[Device]()
    for process in processes:
        own = [device for device in devices if device.process_index == process]
        if len(own) < (block := process_of.count(process)):
            raise ValueError(
                f"{stages} stages in blocks over {count} processes need {block} devices of "
                f"process {process}: use fewer stages, or more processes"
            )
        order += own[:block]
    return tuple(order)


# The functions below check options against each other and against the devices.


def settings_of(loss_fn: Any, optimizer: Any, devices: Any, options: dict[str, Any]) -> Settings:
    """Returns the settings of a pipeline.

    Args:
        loss_fn: as the user gave it.
        optimizer: as the user gave it.
        devices: as the user gave them.
        options: values by option name, each already checked alone; the function removes some of
            them.

    Raises:
        ValueError: an option contradicts another one, or the devices.
    """
    check_functions(loss_fn, optimizer, has_state=options["has_state"])
    take, schedule, planner = options.pop, options["schedule"], options["planner"]
    reductions = Reductions(take("aux_reduce") or {}, take("model_state_reduce") or {})
    _check_leaves(reductions, has_aux=options["has_aux"], has_state=options["has_state"])
    check_deferred(options)
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
    # Devices that the plan does not use are for later plans. The user gives no speeds for them.
    planned = stages.device_count if isinstance(stages, Plan) and devices is None else len(used)
    check_speeds(speeds := take("speeds") or (), planned)
    hosts = present_hosts()
    return Settings(
        loss_fn=loss_fn,
        optimizer=optimizer,
        stages=stages,
        microbatches=microbatches,
        limits=device_limits(take("memory_limit"), used, planned, hosts),
        host_limit_bytes=host_limit(take("host_memory_limit"), used),
        speeds=speeds,
        fates=take("fates") or {},
        state_fates=take("state_fates") or {},
        devices=used,
        places=places,
        splits_unasked=asked is None,
        hosts=hosts,
        replicas=() if counts is None else replicas_at(counts),
        shares=shares,
        sharding=laid,
        reductions=reductions,
        **options,
    )


def _check_leaves(reductions: Reductions, *, has_aux: bool, has_state: bool) -> None:
    """Raises ValueError for reductions of aux or model state that the loss does not return."""
    for rules, returns_some, option, flag in (
        (reductions.aux, has_aux, "aux_reduce", "has_aux"),
        (reductions.state, has_state, "model_state_reduce", "has_state"),
    ):
        if rules and not returns_some:
            raise ValueError(
                f"{option} is given, but the loss returns nothing of that kind: say {flag}=True"
            )


def shares_devices(replicas: str | tuple[int, ...] | None, stages: Stages, planner: str) -> bool:
    """Tells whether the planner decides how many devices each stage has.

    Args:
        replicas: "auto", or how many devices each stage has.
        stages: the number of stages, or a plan; None if neither is given.
        planner: the planner's name.

    Raises:
        ValueError: `replicas` is "auto", but the planner cannot choose it, or a plan sets it.
    """
    if replicas != "auto":
        return False
    if isinstance(stages, Plan):
        raise ValueError(
            f"replicas='auto' is given with a plan, whose stages have {stages.replicas} "
            "devices: leave it out"
        )
    if planner not in shape_planners():
        raise ValueError(
            f"replicas='auto' is decided by planners {', '.join(shape_planners())}, not by "
            f"'{planner}': name one of these, or give the devices of each stage, such as "
            "replicas=(2, 1)"
        )
    if find_planner(planner).as_paper and stages is not None:
        raise ValueError(
            f"replicas='auto' with planner '{planner}', which decides the number of stages "
            "itself: leave stages out"
        )
    return True


def stages_under(stages: Stages, schedule: Schedule, microbatches: int, *, shares: bool) -> Stages:
    """Returns the number of stages or the plan, under a schedule; None if a planner decides.

    Args:
        stages: the number of stages, or a plan; None if neither is given.
        schedule: the schedule, which may refuse the numbers or warn about idle devices.
        microbatches: how many micro-batches a step has.
        shares: whether the planner decides how many devices each stage has.
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
    """Returns how many devices each stage has; None if each has one, or a plan sets the numbers.

    Args:
        counts: the number of devices that the user gives to each stage; None if not given.
        stages: the number of stages, or a plan.
        schedule: the schedule; some schedules cannot have replicas.

    Raises:
        ValueError: the number of counts is not the number of stages, or a plan has other counts.
    """
    if isinstance(stages, Plan):
        if counts not in (None, stages.replicas):
            raise ValueError(
                f"replicas={counts} is given with a plan, whose stages have "
                f"{stages.replicas}: leave it out"
            )
        return None
    if counts is not None and len(counts) != stages:
        raise ValueError(
            f"replicas={counts} is for {len(counts)} stages, there are {stages}: give a "
            "number for each"
        )
    if counts is None or max(counts) == 1:
        return None
    check_replicable(schedule)
    return counts
