"""Devices, links and clusters."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """How long `size` bytes take."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


INFINITE = Link(float("inf"))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What one device can do; `flops_per_s` by dtype, as matrix products reach it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 5e-6


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of equal devices.

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
