"""Places of several devices, and the rules by which parameters lie over their axes, as a user gives them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jvpipe._jax import Device, DeviceGroup, JaxprEqn, devices_in
from jvpipe.ir.layers import Spec
from jvpipe.ir.sharding import Sharding, named_axes, words
from jvpipe.trace.jaxprs import every
from jvpipe.util.brief import brief

_USUAL = "sharding={'.*/kernel': P(None, 'model')}"


def inner_axes(
    devices: Any, sharding: Any, batch_axis: Any, replicas: Any
) -> tuple[Any, Sharding | None]:
    """The devices, with a group for each mesh, and how parameters and batches lie over such a group; None without.

    Args:
        devices: as the user gave them.
        sharding: as the user gave it.
        batch_axis: as the user gave it.
        replicas: as the user gave them.

    Raises:
        ValueError: the meshes differ, overlap or go over processes, or the rules are none for them.
    """
    given = list(devices) if isinstance(devices, Sequence) else []
    meshes = [each for each in given if isinstance(each, Mesh)]
    if not meshes and sharding is None and batch_axis is None:
        return devices, None
    if not meshes:
        raise ValueError(
            "sharding and batch_axis name axes of meshes, and devices has none: give a jax.sharding.Mesh for each "
            "stage, devices=[Mesh(jax.devices()[:2], ('model',)), ...]"
        )
    if len(meshes) < len(given):
        raise ValueError(
            f"devices has {len(meshes)} meshes and {len(given) - len(meshes)} others: give a mesh for each stage"
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
    axes = _common_axes(meshes)
    if batch_axis is not None and batch_axis not in tuple(axes):
        raise ValueError(
            f"batch_axis={brief(batch_axis)} is not an axis of the meshes: they have {_listed(axes)}"
        )
    groups = [
        DeviceGroup(Mesh(mesh.devices, mesh.axis_names)) for mesh in meshes
    ]  # whose axes the compiler handles
    _check_apart(groups)
    if not sharding and batch_axis is not None:
        return groups, Sharding({}, axes, batch_axis)
    return groups, Sharding(_checked_rules(sharding, axes), axes, batch_axis)


def _listed(axes: Mapping[str, int]) -> str:
    return ", ".join(map(repr, axes))


def _common_axes(meshes: Sequence[Mesh]) -> dict[str, int]:
    """The axes of all meshes, with their sizes."""
    axes = [dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)) for mesh in meshes]
    if other := next(
        (i for i, each in enumerate(axes) if list(each.items()) != list(axes[0].items())), None
    ):
        raise ValueError(
            f"the mesh of stage 0 has axes {axes[0]}, that of stage {other} {axes[other]}: give all the same axes"
        )
    return axes[0]


def _check_apart(groups: Sequence[DeviceGroup]) -> None:
    """Raises ValueError if a device is in two meshes, or a mesh in several processes."""
    holder: dict[Device, DeviceGroup] = {}
    for group in groups:
        members = devices_in(group)
        processes = sorted({device.process_index for device in members})
        if len(processes) > 1:
            raise ValueError(
                f"the mesh of {group} has devices of processes {processes}: the inner axes of a place cannot go over "
                "several, give each mesh devices of one"
            )
        if shared := [device for device in members if holder.setdefault(device, group) != group]:
            raise ValueError(
                f"device {shared[0]} is in the mesh of {holder[shared[0]]} and in that of {group}: give each a device "
                "of its own, or name the same mesh twice for stages that share it"
            )


def check_shard_maps(eqns: Iterable[JaxprEqn], axes: Mapping[str, int]) -> None:
    """Raises ValueError for a `jax.shard_map` over another mesh than that of a stage.

    Args:
        eqns: of the loss.
        axes: of the meshes that stages are on, with their sizes; none: each stage is on one device.
    """
    for eqn in every(eqns):
        if eqn.primitive.name == "shard_map" and (own := dict(eqn.params["mesh"].shape)) != dict(
            axes
        ):
            stages = f"on meshes of {dict(axes)}" if axes else "on one device each"
            raise ValueError(
                f"the loss calls jax.shard_map over a mesh of {own}, and stages are {stages}: give each stage such a "
                "mesh, devices=[Mesh(...), ...], with sharding= or batch_axis="
            )


def checked_sharding(name: str, sharding: Any) -> Mapping[Any, Any]:
    """Rules by which parameters lie over axes, which are not looked at before the meshes are known."""
    if not isinstance(sharding, Mapping) or not sharding:
        raise ValueError(
            f"{name} must say what lies over the axes of meshes, such as {_USUAL}, not {brief(sharding)}"
        )
    return sharding


def _checked_rules(sharding: Any, axes: Mapping[str, int]) -> dict[str, Spec]:
    """The rules, whose axes are those of the meshes."""
    if not isinstance(sharding, Mapping) or not sharding:
        raise ValueError(
            f"devices has meshes, so sharding must say what lies over their axes, such as {_USUAL}, not "
            f"{brief(sharding)}; or batch_axis, which of them has the examples"
        )
    return {_checked_rule(rule): _checked_spec(rule, spec, axes) for rule, spec in sharding.items()}


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
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries
