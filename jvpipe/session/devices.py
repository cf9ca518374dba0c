"""Turns options into settings: the device of each stage, limits of memory, meshes and sharding."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jvpipe._jax import Device, DeviceGroup, devices_in, is_own
from jvpipe.ir.layers import Spec
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding, named_axes, words
from jvpipe.papers.registry import find_planner, shape_planners
from jvpipe.runtime.engine.hosts import Hosts, present_hosts
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules import Schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    Limits,
    check_chooser,
    check_deferred,
    check_functions,
    check_speeds,
)
from jvpipe.session.settings import Settings
from jvpipe.util.brief import brief
from jvpipe.util.given import several
from jvpipe.util.sizes import GIB, limits_of_each

_ALIKE = 0.98
"""Devices whose reported limits differ by little count as equal: each gets the smallest reported
limit that is at least this share of its own."""
_WHOLE = 0.92
"""The share of a GPU's reported memory that a plan may fill. The rest is for the gaps that the
allocator leaves between arrays."""


def checked_devices(devices: Any) -> list[Device]:
    """Checks the devices that the user gives, and returns them; for None, all devices of JAX."""
    chosen = several(jax.devices() if devices is None else devices)
    if not chosen or not all(hasattr(device, "addressable_memories") for device in chosen):
        raise ValueError(
            "devices must be a list of JAX devices, one per stage, such as [jax.devices()[i] for i in (0, 1)], not "
            f"{brief(devices)}"
        )
    return chosen


def place(
    stages: int | Plan | None,
    devices: Any,
    schedule: Schedule,
    replicas: Sequence[int] | None,
    *,
    shares: bool,
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """Finds the distinct devices, and for each stage the index of its first device among them.

    All devices that the user gives are returned, used or not, because a later plan may have more
    stages. Stages take devices in order: stage 0 takes as many as it has replicas, then stage 1.

    Args:
        stages: how many devices a micro-batch passes, or a plan; None if a planner decides it.
        devices: the devices as the user gave them.
        schedule: says which stages share a device.
        replicas: how many devices each stage takes, if some stage takes several.
        shares: whether the planner decides how many devices each stage takes.

    Returns:
        The devices and the indices. There are no indices if a plan or a planner decides them.

    Raises:
        ValueError: there are too few devices, or two replicas would share one.
    """
    offered = checked_devices(devices)
    # Stages share a device that the user names more than once. Replicas cannot share a device.
    if shares or replicas:
        _check_different(offered)
    elif devices is None and stages:
        count = stages.device_count if isinstance(stages, Plan) else stages
        offered = [*dealt(count, offered), *offered]
    # `dict.fromkeys` keeps the order, which is the order in which stages take devices.
    distinct = tuple(dict.fromkeys(offered))
    available = len(distinct if devices is None else offered)
    if isinstance(stages, Plan) or stages is None:
        return distinct, ()
    counts = replicas or (1,) * stages
    if sum(counts) > available:
        raise ValueError(_too_few(stages, available, replicas, shares=shares))
    if shares:
        return distinct, ()
    used = distinct if devices is not None else tuple(dict.fromkeys(offered[: sum(counts)]))
    firsts = [0, *accumulate(counts)]
    places = [schedule.device_of(stage, stages) for stage in range(schedule.stages_on(stages))]
    return used, tuple(used.index(offered[firsts[place]]) for place in places)


def _too_few(stages: int, count: int, replicas: Sequence[int] | None, *, shares: bool) -> str:
    """Writes how many devices are needed and present, and what the user can change."""
    if replicas:
        return (
            f"replicas={tuple(replicas)} need {sum(replicas)} devices, there are {count}: use fewer replicas or "
            "stages"
        )
    shared = ", or share devices by naming them more than once in devices="
    return (
        f"{stages} stages need {stages} devices, there are {count}: use at most {count} stages"
        f"{'' if shares else shared}"
    )


def _check_different(devices: Sequence[Device]) -> None:
    """Raises ValueError if a device is named twice."""
    if twice := next((device for i, device in enumerate(devices) if device in devices[:i]), None):
        raise ValueError(
            f"device {twice} is named twice: where stages are replicated each replica needs a device of its own"
        )


def replicas_at(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the devices of each stage as indices, given how many devices each stage has.

    >>> replicas_at((2, 1))
    ((0, 1), (2,))
    """
    return tuple(tuple(range(a, b)) for a, b in pairwise([0, *accumulate(replicas)]))


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
    if len(processes) == 1:
        return tuple(devices)
    if stages < len(processes):
        raise ValueError(
            f"{stages} stages are too few for {len(processes)} processes: use at least as many stages, or fewer "
            "processes"
        )
    # With such blocks, few tensors cross between processes.
    process_of = [processes[s * len(processes) // stages] for s in range(stages)]
    order = list[Device]()
    for process in processes:
        own = [device for device in devices if device.process_index == process]
        if len(own) < (block := process_of.count(process)):
            raise ValueError(
                f"{stages} stages in blocks over {len(processes)} processes need {block} devices of process {process}: "
                "use fewer stages, or more processes"
            )
        order += own[:block]
    return tuple(order)


def device_limits(
    limits: Limits,
    devices: Sequence[Device],
    planned: int,
    hosts: Hosts | None,
) -> tuple[int, ...]:
    """Returns each device's limit in bytes; empty if no limit is given and none reported (CPUs).

    Args:
        limits: one limit for all devices; or one for each device; or one for each device of the
            plan (other devices get the smallest of the given limits). None: what devices report.
        devices: all devices of the run.
        planned: how many devices the plan uses; they come first in `devices`.
        hosts: the processes of the run, if there are several.

    Raises:
        ValueError: there are more or fewer limits than devices.
    """
    # All processes must exchange reports, even those that were given a limit: a process that was
    # given none waits for the reports of all.
    if limits is None or hosts is not None:
        reported = reported_limits(devices, hosts)
        if limits is None:
            return reported
    if isinstance(limits, int) or len(limits) == len(devices):
        return limits_of_each(limits, len(devices))
    of_planned = limits_of_each(limits, planned)
    return (*of_planned, *(min(of_planned),) * (len(devices) - len(of_planned)))


def reported_limits(devices: Sequence[Device], hosts: Hosts | None = None) -> tuple[int, ...]:
    """Returns the limits in bytes that devices report, with nearly equal limits made equal.

    Args:
        devices: all devices of the run.
        hosts: the processes of the run, if there are several. Each tells the others the limits of
            its own devices.

    Returns:
        A limit for each device; none if no device reports one.
    """
    limits = {
        device.id: limit
        for device in devices
        if is_own(device) and (limit := _reported(device)) is not None
    }
    if hosts is not None:
        words = hosts.exchange("devices' memory", json.dumps(list(limits.items())).encode())
        limits = {at: limit for word in words for at, limit in json.loads(word)}
    if not limits:
        return ()
    # A device that reports nothing gets the smallest limit that another one reports.
    by_device = [limits.get(device.id, min(limits.values())) for device in devices]
    return tuple(min(x for x in by_device if x >= _ALIKE * limit) for limit in by_device)


def _reported(device: Device) -> int | None:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(_WHOLE * limit) if limit and device.platform == "gpu" else limit


def host_limit(asked: int | None, devices: Sequence[Device]) -> int | None:
    """Returns how many bytes the host may hold for all devices; None if there is no limit.

    Args:
        asked: the limit that the user gives. If it is None and there are GPUs, the limit is the sum
            of what JAX lets each process with GPUs pin in host memory.
        devices: the devices of all processes.
    """
    processes = {device.process_index for device in devices if device.platform == "gpu"}
    if asked is not None or not processes:
        return asked
    return len(processes) * int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) * GIB


# Meshes: a stage may run on a mesh of devices. Rules say how parameters lie over the mesh's axes.

_USUAL = "sharding={'.*/kernel': P(None, 'model')}"


def inner_axes(
    devices: Any, sharding: Any, batch_axis: Any, replicas: Any
) -> tuple[Any, Sharding | None]:
    """Makes each mesh a device group (which counts as one device), and checks the sharding rules.

    The rules say how parameters and batches lie over a mesh. Without meshes, returns the devices as
    they are, and None in place of rules.

    Args:
        devices: as the user gave them, like the other arguments.
        sharding: a `PartitionSpec` for each pattern of parameters' paths.
        batch_axis: the axis over which the examples of a micro-batch lie.
        replicas: how many meshes each stage has.

    Raises:
        ValueError: meshes have different axes, share a device or cross processes; or a rule names
            an axis that the meshes do not have.
    """
    listed = list(devices) if isinstance(devices, Sequence) else []
    meshes = [one for one in listed if isinstance(one, Mesh)]
    if not meshes:
        if sharding is None and batch_axis is None:
            return devices, None
        raise ValueError(
            "sharding and batch_axis name axes of meshes, and devices has none: give a jax.sharding.Mesh for each "
            "stage, devices=[Mesh(jax.devices()[:2], ('model',)), ...]"
        )
    if len(meshes) < len(listed):
        raise ValueError(
            f"devices has {len(meshes)} meshes and {len(listed) - len(meshes)} others: give a mesh for each stage"
        )
    if replicas == "auto":
        raise ValueError(
            "replicas='auto' counts devices, not meshes: say how many each stage has, replicas=(2, 1)"
        )
    if replicas is not None and batch_axis is not None:
        raise ValueError(
            f"batch_axis={brief(batch_axis)} and replicas={brief(replicas)} both share out the examples of a "
            "micro-batch: leave one of them out"
        )
    common = _common_axes(meshes)
    if batch_axis is not None and batch_axis not in tuple(common):
        raise ValueError(
            f"batch_axis={brief(batch_axis)} is not an axis of the meshes: they have {_listed(common)}"
        )
    # Meshes made here have axes of JAX's default type, over which the compiler lays out values.
    groups = [DeviceGroup(Mesh(mesh.devices, mesh.axis_names)) for mesh in meshes]
    _check_apart(groups)
    if sharding is None and batch_axis is None:
        raise ValueError(
            f"devices has meshes, so sharding must say what lies over their axes, such as {_USUAL}, not "
            "None; or give batch_axis, the axis along which examples are cut"
        )
    rules = sharding or {}
    specs = {_checked_rule(rule): _checked_spec(rule, spec, common) for rule, spec in rules.items()}
    return groups, Sharding(specs, common, batch_axis)


def _listed(axes: Mapping[str, int]) -> str:
    return ", ".join(map(repr, axes))


def _common_axes(meshes: Sequence[Mesh]) -> dict[str, int]:
    """Returns the axes that all meshes have, with their sizes."""
    first = dict(meshes[0].shape)
    for stage, mesh in enumerate(meshes):
        # Shapes are ordered dicts, so meshes whose axes have another order differ.
        if mesh.shape != meshes[0].shape:
            raise ValueError(
                f"the mesh of stage 0 has axes {first}, that of stage {stage} {dict(mesh.shape)}: "
                "give all the same axes"
            )
    return first


def _check_apart(groups: Sequence[DeviceGroup]) -> None:
    """Raises ValueError if a device is in two different meshes, or a mesh in several processes."""
    holder: dict[Device, DeviceGroup] = {}
    for group in groups:
        members = devices_in(group)
        processes = sorted({device.process_index for device in members})
        if len(processes) > 1:
            raise ValueError(
                f"the mesh of {group} has devices of processes {processes}: the inner axes of a place cannot go over "
                "several processes: give each mesh devices of one process"
            )
        if shared := [device for device in members if holder.setdefault(device, group) != group]:
            raise ValueError(
                f"device {shared[0]} is in the mesh of {holder[shared[0]]} and in that of {group}: give each a device "
                "of its own, or name the same mesh twice for stages that share it"
            )


def checked_sharding(name: str, sharding: Any) -> Mapping[Any, Any]:
    """Checks that `sharding` is a mapping with rules; the rules are checked against axes later."""
    if not isinstance(sharding, Mapping) or not sharding:
        raise ValueError(
            f"{name} must say what lies over the axes of meshes, such as {_USUAL}, not {brief(sharding)}"
        )
    return sharding


def _checked_rule(rule: Any) -> str:
    try:
        re.compile(rule)
    except (TypeError, re.error) as error:
        raise ValueError(
            f"sharding rule {brief(rule)} is not a regular expression ({error}): write {_USUAL}"
        ) from error
    return rule


def _checked_spec(rule: str, spec: Any, axes: Mapping[str, int]) -> Spec:
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"sharding rule {brief(rule)} needs a jax.sharding.PartitionSpec, not {brief(spec)}: write {_USUAL}"
        )
    entries = tuple(spec)
    plain = all(axis is None or isinstance(axis, str | tuple) for axis in entries)
    named = named_axes(entries) if plain else ()
    if not plain or any(axis not in axes for axis in named) or len(set(named)) < len(named):
        raise ValueError(
            f"sharding rule {brief(rule)} says {words(entries)}: each entry is None or an axis of the meshes, each "
            f"axis once; they have {_listed(axes)}"
        )
    # Trailing Nones have no effect. Without them, specs with the same effect compare equal.
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


# Options become settings: they are checked against each other, and against the devices.


def settings_of(loss_fn: Any, optimizer: Any, devices: Any, options: dict[str, Any]) -> Settings:
    """Returns the settings of a pipeline.

    Args:
        loss_fn: as the user gave it.
        optimizer: as the user gave it.
        devices: as the user gave them.
        options: values by option name, each already checked on its own; some are removed from the
            dict.

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
    # Devices beyond those of the plan are for later plans. The user gives no speeds for them.
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


def shares_devices(
    replicas: str | tuple[int, ...] | None, stages: int | Plan | None, planner: str
) -> bool:
    """Tells whether the planner is to decide how many devices each stage has.

    Args:
        replicas: "auto", or how many devices each stage has.
        stages: the number of stages, or a plan; None if neither is given.
        planner: the planner's name.

    Raises:
        ValueError: `replicas` is "auto", but this planner cannot decide it or a plan has done so.
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
    """Returns the number of stages or the plan, for a schedule; None if a planner decides it.

    Args:
        stages: the number of stages, or a plan; None if neither is given.
        schedule: the schedule, which may refuse the numbers, or warn of idle devices.
        microbatches: how many a step has.
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
    """Returns how many devices each stage has; None if each has one, or a plan says how many.

    Args:
        counts: how many devices the user gives to each stage, if any.
        stages: the number of stages, or a plan.
        schedule: the schedule; some schedules cannot have replicas.

    Raises:
        ValueError: there are more or fewer counts than stages, or a plan has other counts.
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
