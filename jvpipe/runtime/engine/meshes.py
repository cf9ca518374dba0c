"""Meshes that a user gives as devices, and the rules that cut parameters along their axes.

A stage can run on a mesh of several devices instead of a single device. The axes of the meshes are
called inner axes, because they lie inside a stage of the pipeline.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jvpipe._jax import JaxprEqn
from jvpipe.ir.layers import Spec
from jvpipe.ir.sharding import Sharding, named_axes, words
from jvpipe.trace.jaxprs import every
from jvpipe.util.brief import brief
from jvpipe.util.devices import Device, DeviceGroup, devices_in

_USUAL = "sharding={'.*/kernel': P(None, 'model')}"
"""An example for messages."""


def inner_axes(
    devices: Any, sharding: Any, batch_axis: Any, replicas: Any
) -> tuple[Any, Sharding | None]:
    """Makes each mesh a device group (which counts as one device), and checks the sharding rules.

    All arguments are as the user gave them.

    Args:
        devices: the devices, or a mesh for each stage.
        sharding: by pattern (a regular expression) of parameters' paths, a `PartitionSpec` that
            says how the parameters are cut over a mesh.
        batch_axis: the axis over which the examples of a micro-batch lie.
        replicas: how many meshes each stage has.

    Returns:
        The groups, and how parameters and batches lie over them. Without meshes, the devices as
        they are, and None.

    Raises:
        ValueError: meshes have different axes, share a device or have devices of several processes;
            or a rule names an axis that the meshes do not have.
    """
    listed = list(devices) if isinstance(devices, Sequence) else []
    meshes = [one for one in listed if isinstance(one, Mesh)]
    if not meshes:
        if sharding is None and batch_axis is None:
            return devices, None
        raise ValueError(
            "sharding and batch_axis name axes of meshes, and devices has none: give a "
            "jax.sharding.Mesh for each stage, devices=[Mesh(jax.devices()[:2], "
            "('model',)), ...]"
        )
    if len(meshes) < len(listed):
        raise ValueError(
            f"devices has {len(meshes)} meshes and {len(listed) - len(meshes)} others: "
            "give a mesh for each stage"
        )
    _check_replicas(replicas, batch_axis)
    common = _common_axes(meshes)
    if batch_axis is not None and batch_axis not in tuple(common):
        raise ValueError(
            f"batch_axis={brief(batch_axis)} is not an axis of the meshes: they have "
            f"{_listed(common)}"
        )
    # The user's meshes may have axes of any type. The meshes made here have axes of JAX's default
    # type, over which the compiler chooses how values lie.
    groups = [DeviceGroup(Mesh(mesh.devices, mesh.axis_names)) for mesh in meshes]
    _check_apart(groups)
    if sharding is None and batch_axis is None:
        raise ValueError(
            "devices has meshes, so sharding must say what lies over their axes, such as "
            f"{_USUAL}, not None; or give batch_axis, the axis along which examples are cut"
        )
    rules = sharding or {}
    specs: dict[str, Spec] = {}
    for rule, spec in rules.items():
        specs[_checked_rule(rule)] = _checked_spec(rule, spec, common)
    return groups, Sharding(specs, common, batch_axis)


def _check_replicas(replicas: Any, batch_axis: Any) -> None:
    """Raises ValueError for replicas that stages on meshes cannot have."""
    if replicas == "auto":
        raise ValueError(
            "replicas='auto' counts devices, not meshes: say how many each stage has, "
            "replicas=(2, 1)"
        )
    if replicas is not None and batch_axis is not None:
        raise ValueError(
            f"batch_axis={brief(batch_axis)} and replicas={brief(replicas)} both share out "
            "the examples of a micro-batch: leave one of them out"
        )


def _listed(axes: Mapping[str, int]) -> str:
    return ", ".join(map(repr, axes))


def _common_axes(meshes: Sequence[Mesh]) -> dict[str, int]:
    """Returns the axes that all meshes have, with their sizes."""
    first = dict(meshes[0].shape)
    for stage, mesh in enumerate(meshes):
        # Shapes are ordered dicts, so the same axes in another order are not equal.
        if mesh.shape != meshes[0].shape:
            raise ValueError(
                f"the mesh of stage 0 has axes {first}, that of stage {stage} "
                f"{dict(mesh.shape)}: give all the same axes"
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
                f"the mesh of {group} has devices of processes {processes}: the "
                "inner axes of a place cannot go over several processes: give each "
                "mesh devices of one process"
            )
        if shared := [device for device in members if holder.setdefault(device, group) != group]:
            raise ValueError(
                f"device {shared[0]} is in the mesh of {holder[shared[0]]} and in that of "
                f"{group}: give each mesh its own devices, or list the same mesh twice for "
                "stages that share it"
            )


def checked_sharding(name: str, sharding: Any) -> Mapping[Any, Any]:
    """Checks that `sharding` is a mapping with rules; `inner_axes` checks the rules themselves."""
    if not isinstance(sharding, Mapping) or not sharding:
        raise ValueError(
            f"{name} must say what lies over the axes of meshes, such as {_USUAL}, not "
            f"{brief(sharding)}"
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
            f"sharding rule {brief(rule)} needs a jax.sharding.PartitionSpec, not "
            f"{brief(spec)}: write {_USUAL}"
        )
    entries = tuple(spec)
    plain = all(axis is None or isinstance(axis, str | tuple) for axis in entries)
    named = named_axes(entries) if plain else ()
    unknown = [axis for axis in named if axis not in axes]
    if not plain or unknown or len(set(named)) < len(named):
        raise ValueError(
            f"sharding rule {brief(rule)} says {words(entries)}: each entry is None or an "
            f"axis of the meshes, each axis once; they have {_listed(axes)}"
        )
    # Trailing Nones have no effect. Without them, specs with the same effect compare equal.
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def check_shard_maps(eqns: Iterable[JaxprEqn], axes: Mapping[str, int]) -> None:
    """Raises ValueError for a `jax.shard_map` over a mesh that differs from the stages' meshes.

    Args:
        eqns: the equations of the loss.
        axes: the axes of the stages' meshes with their sizes; empty if a stage is on one device.
    """
    for eqn in every(eqns):
        if eqn.primitive.name != "shard_map":
            continue
        axes_inside = dict(eqn.params["mesh"].shape)
        if axes_inside != dict(axes):
            stages = f"on meshes of {dict(axes)}" if axes else "on one device each"
            raise ValueError(
                f"the loss calls jax.shard_map over a mesh of {axes_inside}, and stages are "
                f"{stages}: give each stage such a mesh, devices=[Mesh(...), ...], with "
                "sharding= or batch_axis="
            )
