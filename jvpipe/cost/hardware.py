"""Devices, links and clusters."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size: int | float) -> float:
        """The seconds that `size` bytes take.

        >>> Link(1e9, 1e-3).seconds(10**6), Link(1e9, 1e-3).seconds(0)
        (0.002, 0.0)
        """
        return self.latency_s + size / self.bytes_per_s if size else 0.0


INFINITE = Link(float("inf"))

_SUBSTITUTES = {"bfloat16": "float16", "float16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The speeds and the memory of one device.

    `flops_per_s` by dtype, as matrix products reach it; `elementwise_per_s` are elementwise operations, where these
    and not the bytes that they move are the limit; `launch_s` is what each kernel takes besides.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 5e-6
    elementwise_per_s: float = float("inf")

    def products_per_s(self, dtype: str) -> float:
        """Floating-point operations per second of products of a dtype; of a similar one where it is not listed.

        >>> Accelerator("small", 10**9, 1e9, {"float32": 4e9}).products_per_s("float64")
        2000000000.0
        """
        for name in (dtype, _SUBSTITUTES.get(dtype, dtype)):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        return self.flops_per_s["float32"] / (2 if dtype in ("float64", "complex128") else 1)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of devices: all are `device`, or those of `unlike`, machine by machine, the first of which is `device`.

    `host` is the link of each device to its host, `peer` the one between devices of a machine, `network` the one
    between machines. `peer_uses_host` says that transfers between devices take the host's links (PCIe): then they
    share them with swapped tensors.
    """

    name: str
    device: Accelerator
    devices_per_machine: int
    machines: int = 1
    host: Link = INFINITE
    peer: Link = INFINITE
    network: Link = INFINITE
    peer_uses_host: bool = True
    host_memory_bytes: int | None = None
    unlike: tuple[Accelerator, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.devices_per_machine * self.machines

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """What each device is.

        >>> small, large = (Accelerator(name, 10**9, 1e9, {}) for name in ("small", "large"))
        >>> [each.name for each in Cluster("mixed", large, 2, unlike=(large, small)).accelerators]
        ['large', 'small']
        """
        return self.unlike or (self.device,) * self.devices

    def between(self, a: int, b: int) -> Link:
        """The link from device `a` to device `b`; devices are counted machine by machine."""
        same = a // self.devices_per_machine == b // self.devices_per_machine
        return self.peer if same else self.network
