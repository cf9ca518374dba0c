"""Devices, links and clusters."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jvpipe.cost.frameworks import XLA, Framework
from jvpipe.cost.tiling import Tiling


def _check(
    what: str, name: str, value: int | float, *, zero: bool = False, infinite: bool = False
) -> None:
    """Refuses numbers that no device has; NaN is above nothing."""
    if not (value > 0 or (zero and value == 0)) or (math.isinf(value) and not infinite):
        least = "of at least 0" if zero else "above 0"
        finite = "" if infinite else " that is finite"
        raise ValueError(f"{name}={value!r} of {what} must be a number {least}{finite}")


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, in one direction; an infinite rate stands for one that is not looked at."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check("a link", "bytes_per_s", self.bytes_per_s, infinite=True)
        _check("a link", "latency_s", self.latency_s, zero=True)

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
    and not the bytes that they move are the limit. `launch_s` is what each kernel takes besides: so kernels of few
    bytes reach less of `memory_bytes_per_s`, half of it at `launch_s * memory_bytes_per_s`. `platform` says whose
    compiler makes its programs: `cuda`, `tpu` or `cpu`; `cores` are the multiprocessors of a GPU, 0 if nobody knows;
    `scratch_bytes` those that a TPU has beside its cores, where it keeps what is small. With a `tiling` products reach
    `flops_per_s` where they fill all cores. `framework` is what runs programs.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 5e-6
    elementwise_per_s: float = float("inf")
    platform: str = "cuda"
    cores: int = 0
    tiling: Tiling | None = None
    framework: Framework = XLA
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        what = f"the device {self.name!r}"
        _check(what, "memory_bytes", self.memory_bytes)
        _check(what, "memory_bytes_per_s", self.memory_bytes_per_s)
        for dtype, rate in self.flops_per_s.items():
            _check(what, f"flops_per_s[{dtype!r}]", rate)
        _check(what, "launch_s", self.launch_s, zero=True)
        _check(what, "elementwise_per_s", self.elementwise_per_s, infinite=True)

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
    share them with swapped tensors. `networks` are those that a machine has: its devices share them.
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
    networks: int = 1

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

    def machines_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The machine of each device."""
        return tuple(device // self.devices_per_machine for device in devices)

    def reducing(self, devices: Sequence[int]) -> Link:
        """An all-reduce over devices, as a link for the bytes of one summand; each of the devices holds one.

        Inside machines in a ring (its reduce-scatter before, its all-gather after), between machines in another ring
        of the parts that each device of a machine has then; as many of these pass at once as there are networks.

        Args:
            devices: their numbers, machine by machine.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 4, 2, peer=Link(8e9), network=Link(1e9))
        >>> [round(cluster.reducing(devices).seconds(8e9), 9) for devices in ([0, 1, 2, 3], [0, 4], [3])]
        [1.5, 8.0, 0.0]
        """
        if len(devices) < 2:
            return INFINITE
        devices_on = Counter(self.machines_of(devices))
        inside = _ring(self.peer, max(devices_on.values()))
        between = _ring(self.network, len(devices_on), min(*devices_on.values(), self.networks))
        byte_s = 1 / inside.bytes_per_s + 1 / between.bytes_per_s
        return Link(1 / byte_s if byte_s else math.inf, inside.latency_s + between.latency_s)

    def least_reduce_s(self, count: int, size: int | float) -> float:
        """The seconds that no all-reduce of `size` bytes over so many devices or more is below, wherever they are.

        Args:
            count: of devices.
            size: bytes of one summand.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 4, 2, peer=Link(8e9), network=Link(1e9))
        >>> cluster.least_reduce_s(4, 8e9), cluster.least_reduce_s(5, 8e9), cluster.least_reduce_s(1, 8e9)
        (1.5, 9.333333333333334, 0.0)
        """
        at_once = min(self.networks, self.devices_per_machine)
        ways = (
            _ring(self.peer, per_machine).seconds(size)
            + _ring(self.network, machines, at_once).seconds(size)
            for machines in range(1, min(count, self.machines) + 1)
            if (per_machine := -(-count // machines)) <= self.devices_per_machine
        )
        return min(ways, default=float("inf")) if size else 0.0

    def way(self, senders: Sequence[int], readers: Sequence[int]) -> Link:
        """The way of what some devices hold in equal slices and others read in equal slices, as one link for all of it.

        Slices pass at once, between machines as many as there are networks.

        Args:
            senders: their numbers.
            readers: their numbers.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 2, 2, peer=Link(4e9), network=Link(1e9))
        >>> cluster.way([0], [1]).seconds(8e9), cluster.way([0, 1], [2, 3]).seconds(8e9)
        (2.0, 8.0)
        """
        at, to = self.machines_of(senders), self.machines_of(readers)
        ways, link = min(len(at), len(to)), self.peer
        if len({*at, *to}) > 1 and at != to:
            ways, link = min(ways, self.networks * min(len({*at}), len({*to}))), self.network
        return Link(link.bytes_per_s * ways, link.latency_s)


def _ring(link: Link, members: int, at_once: int = 1) -> Link:
    """An all-reduce in a ring, as a link: each member passes on its part to the next, twice around but one place.

    Args:
        link: from one to the next.
        members: of the ring.
        at_once: rings that share the bytes.
    """
    rounds = 2 * (members - 1)
    if not rounds:
        return INFINITE
    return Link(link.bytes_per_s * members * at_once / rounds, rounds * link.latency_s)
