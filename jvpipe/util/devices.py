"""Devices, groups of devices that act as one, and the shardings of arrays on them.

A spec says how an array is cut over a group: it has, for each dimension of the array, the axes of
the group along which the dimension is cut. If a group has two devices along the axis "x", an array
of shape (4, 6) can have one of three specs:

    spec         each device has
    ()           the whole array
    ("x",)       two rows of the array
    (None, "x")  three columns of the array
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


@dataclass(frozen=True)
class DeviceGroup:
    """Several devices that act as one: a mesh with named axes, along which arrays may be cut.

    The properties of a group are those of its first device, because its devices are alike.
    """

    mesh: Mesh

    @property
    def first(self) -> "Device":
        """The first device of the group."""
        return self.mesh.devices.flat[0]

    @property
    def id(self) -> int:
        """The number of the first device."""
        return self.first.id

    @property
    def platform(self) -> str:
        """The platform of all devices, such as `cpu`."""
        return self.first.platform

    @property
    def device_kind(self) -> str:
        """The kind of all devices."""
        return self.first.device_kind

    @property
    def process_index(self) -> int:
        """The number of the process that has all devices of the group."""
        return self.first.process_index

    def memory_stats(self) -> dict[str, int] | None:
        """Returns the memory statistics of the first device."""
        return self.first.memory_stats()

    def addressable_memories(self) -> list[Any]:
        """Returns the memories of the first device."""
        return self.first.addressable_memories()

    def default_memory(self) -> Any:
        """Returns the default memory of the first device."""
        return self.first.default_memory()

    def __str__(self) -> str:
        return "+".join(str(device) for device in self.mesh.devices.flat)


if TYPE_CHECKING:

    class Device(Protocol):
        """The members of `jax.Device`, which type checkers do not accept as a type."""

        @property
        def id(self) -> int:
            """The number of the device."""
            ...

        @property
        def platform(self) -> str:
            """The platform, such as `cpu`."""
            ...

        @property
        def device_kind(self) -> str:
            """The name of the hardware."""
            ...

        @property
        def process_index(self) -> int:
            """The number of the process that has the device."""
            ...

        def memory_stats(self) -> dict[str, int] | None:
            """Returns the memory statistics; None if the device does not report any."""
            ...

        def addressable_memories(self) -> list[Any]:
            """Returns the memories that the device can use."""
            ...

        def default_memory(self) -> Any:
            """Returns the memory in which the device puts arrays by default."""
            ...

else:
    Device = jax.Device | DeviceGroup


def devices_in(device: Device) -> tuple[Device, ...]:
    """Returns the devices of a group, or a single device as a tuple of one."""
    return tuple(device.mesh.devices.flat) if isinstance(device, DeviceGroup) else (device,)


def first_of(device: Device) -> Device:
    """Returns the first device of a group, or a single device itself."""
    return devices_in(device)[0]


@cache
def sharding_on(
    device: Device,
    spec: tuple[Any, ...] = (),
    memory_kind: str | None = None,
) -> Any:
    """Returns the sharding of an array on a device, or over the devices of a group.

    Args:
        device: a device or a group.
        spec: how the array is cut over a group.
        memory_kind: the kind of memory; None for the device's default.
    """
    if isinstance(device, DeviceGroup):
        return NamedSharding(device.mesh, PartitionSpec(*spec), memory_kind=memory_kind)
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def spec_of(array: jax.Array) -> tuple[Any, ...]:
    """Returns the spec of an array; () if each device has the whole array."""
    return tuple(array.sharding.spec) if isinstance(array.sharding, NamedSharding) else ()


def placed(
    like: jax.ShapeDtypeStruct,
    device: Device,
    spec: tuple[Any, ...] = (),
) -> jax.ShapeDtypeStruct:
    """Returns a shape and type with a sharding on a device or over a group.

    Args:
        like: the shape and type.
        device: a device or a group.
        spec: how the array is cut over a group.
    """
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding_on(device, spec))


def is_own(device: Device) -> bool:
    """Tells whether a device belongs to this process."""
    return device.process_index == jax.process_index()


def unshared(value: Any) -> Any:
    """Copies a NumPy array, which its owner may change later; returns other values as they are.

    Without this copy, a CPU device shares the memory of an array that is aligned to 64 bytes, even
    if `jax.device_put` is called with `may_alias=False`.
    """
    return value.copy() if isinstance(value, np.ndarray) else value


def swapper(device: Device, space: str) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that copies an array to another memory of a device.

    Args:
        device: a device or a group.
        space: the kind of the memory, such as `pinned_host`. If the device has no such memory, its
            default memory gets the copy.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = space if space in kinds else device.default_memory().kind
    return lambda x: jax.device_put(x, sharding_on(device, spec_of(x), kind), may_alias=False)


_PACKED = ("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")
"""Types smaller than a byte: devices pack several values into one byte."""


@cache
def is_plain(dtype: Any) -> bool:
    """Tells whether arrays of a type have the same layout in NumPy as on devices.

    Random keys and types smaller than a byte have different layouts.

    >>> is_plain(np.dtype("float32")), is_plain(jax.numpy.dtype("int4"))
    (True, False)
    """
    return isinstance(dtype, np.dtype) and dtype.name not in _PACKED
