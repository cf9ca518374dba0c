"""The hardware as planners see it: devices, links, and clusters of machines with devices.

An all-reduce is described as a link, too: a rate and a latency for the bytes of one summand. So is a
transfer between groups of devices, for the bytes of the whole value. Whoever counts seconds needs
to know links alone.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jvpipe.cost.frameworks import XLA, Framework
from jvpipe.cost.tiling import Tiling


def _check(
    what: str,
    name: str,
    value: int | float,
    *,
    zero: bool = False,
    infinite: bool = False,
) -> None:
    """Raises ValueError for numbers that no device has.

    Args:
        what: the device or link, for the message.
        name: of the number.
        value: the number.
        zero: whether it may be 0.
        infinite: whether it may be infinite.
    """
    positive = value > 0 or (zero and value == 0)  # NaN is neither
    if not positive or (math.isinf(value) and not infinite):
        least = "of at least 0" if zero else "above 0"
        finite = "" if infinite else " that is finite"
        raise ValueError(f"{name}={value!r} of {what} must be a number {least}{finite}")


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, in one direction; an infinite rate stands for a way that takes no time."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check("a link", "bytes_per_s", self.bytes_per_s, infinite=True)
        _check("a link", "latency_s", self.latency_s, zero=True)

    def seconds(self, size: int | float) -> float:
        """Returns the seconds that `size` bytes take.

        >>> Link(1e9, 1e-3).seconds(10**6), Link(1e9, 1e-3).seconds(0)
        (0.002, 0.0)
        """
        return self.latency_s + size / self.bytes_per_s if size else 0.0


INFINITE = Link(float("inf"))

_SUBSTITUTES = {"bfloat16": "float16", "float16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The speeds and the memory of one device.

    Attributes:
        name: of it.
        memory_bytes: its memory.
        memory_bytes_per_s: the rate at which kernels read and write it.
        flops_per_s: the rate of matrix products, by dtype; with a `tiling`, of those that fill all
            cores.
        launch_s: seconds of each kernel beside its work. So kernels of few bytes reach less of the
            memory's rate, half of it at `launch_s * memory_bytes_per_s` bytes.
        elementwise_per_s: elementwise operations per second, where these and not bytes are the
            limit.
        platform: `cuda`, `tpu` or `cpu`; its compiler makes the programs.
        cores: the multiprocessors of a GPU; 0 if the number is not known.
        tiling: how products are dealt out to the cores; None if they are dealt out without loss.
        framework: what runs programs.
        scratch_bytes: the memory beside the cores of a TPU, which keeps small values.
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
        _check(
            what,
            "elementwise_per_s",
            self.elementwise_per_s,
            infinite=True,
        )

    def products_per_s(self, dtype: str) -> float:
        """Returns the floating-point operations per second of products, of a similar dtype if need
        be.

        >>> Accelerator("small", 10**9, 1e9, {"float32": 4e9}).products_per_s("float64")
        2000000000.0
        """
        # Types of 16 bits run on the same units; others are taken to run as float32 does.
        for name in (dtype, _SUBSTITUTES.get(dtype, dtype)):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        return self.flops_per_s["float32"] / (2 if dtype in ("float64", "complex128") else 1)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines with devices; all devices are alike unless `unlike` has one entry for each.

    Attributes:
        name: of it.
        device: each device, or the first of `unlike`.
        devices_per_machine: how many devices a machine has.
        machines: how many machines there are.
        host: the link of each device to its host.
        peer: the link between devices of a machine.
        network: the link between machines.
        peer_uses_host: whether transfers between devices take the host's links (PCIe), which they
            then share with swapped tensors.
        host_memory_bytes: of a machine; None if there is no limit.
        unlike: all devices, machine by machine; empty if they are alike.
        networks: how many network links a machine has; its devices share them.
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
        """The kind of each device.

        >>> small, large = (Accelerator(name, 10**9, 1e9, {}) for name in ("small", "large"))
        >>> [each.name for each in Cluster("mixed", large, 2, unlike=(large, small)).accelerators]
        ['large', 'small']
        """
        return self.unlike or (self.device,) * self.devices

    def machines_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Returns the machine of each of some devices, which are counted machine by machine."""
        return tuple(device // self.devices_per_machine for device in devices)

    def reducing(self, devices: Sequence[int]) -> Link:
        """Describes an all-reduce as a link for the bytes of one summand.

        Each of the devices holds one.

            in each machine       reduce-scatter in a ring: every device has the sum of its part
            between machines      the parts are summed in other rings, as many at once as there are networks
            in each machine       all-gather in the ring: every device has all parts

        The machine with the most members sets the pace of the rings inside. The one with the fewest
        sets how many rings run between machines, if it has fewer members than networks.

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
        # Rings between machines need a device on each of them, and a network of their own.
        at_once = min(*devices_on.values(), self.networks)
        inside = _ring(self.peer, max(devices_on.values()))
        between = _ring(self.network, len(devices_on), at_once)
        # The rings follow one another, so their seconds per byte add up.
        byte_s = 1 / inside.bytes_per_s + 1 / between.bytes_per_s
        return Link(1 / byte_s if byte_s else math.inf, inside.latency_s + between.latency_s)

    def least_reduce_s(self, count: int, size: int | float) -> float:
        """Bounds from below the seconds of an all-reduce over `count` devices or more, wherever
        they are.

        For each number of machines the devices are spread evenly, which makes the fullest machine's
        ring the shortest, and as many rings as possible run between machines.

        Args:
            count: of devices.
            size: bytes of one summand.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 4, 2, peer=Link(8e9), network=Link(1e9))
        >>> cluster.least_reduce_s(4, 8e9), cluster.least_reduce_s(5, 8e9), cluster.least_reduce_s(1, 8e9)
        (1.5, 9.333333333333334, 0.0)
        """
        if not size:
            return 0.0
        at_once = min(self.networks, self.devices_per_machine)
        least_s = math.inf
        for machines in range(1, min(count, self.machines) + 1):
            # Spread evenly: a fuller machine would have the longer ring.
            per_machine = -(-count // machines)
            if per_machine <= self.devices_per_machine:
                inside_s = _ring(self.peer, per_machine).seconds(size)
                between_s = _ring(self.network, machines, at_once).seconds(size)
                least_s = min(least_s, inside_s + between_s)
        return least_s

    def way(self, senders: Sequence[int], readers: Sequence[int]) -> Link:
        """Returns one link for a value that goes from devices that hold slices of it to readers.

        Slices are of one size and pass at the same time, between machines as many at a time as the
        smaller side has networks.

        Args:
            senders: their numbers, machine by machine.
            readers: their numbers.

        Returns:
            A link for the bytes of the whole value.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 2, 2, peer=Link(4e9), network=Link(1e9))
        >>> cluster.way([0], [1]).seconds(8e9), cluster.way([0, 1], [2, 3]).seconds(8e9)
        (2.0, 8.0)
        """
        at = self.machines_of(senders)
        to = self.machines_of(readers)
        ways = min(len(at), len(to))
        link = self.peer
        # Nothing crosses the network where each slice's sender and reader share a machine.
        if at != to and len({*at, *to}) > 1:
            crossing = self.networks * min(len({*at}), len({*to}))
            ways, link = min(ways, crossing), self.network
        return Link(link.bytes_per_s * ways, link.latency_s)


def _ring(link: Link, members: int, at_once: int = 1) -> Link:
    """Describes an all-reduce in a ring as a link for the bytes of one summand.

    The bytes are cut into a part per member. A part goes around once to be summed up and once to be
    handed out, either time through all links but one: 2 (members - 1) rounds of one part each.

    Args:
        link: from one member to the next.
        members: of the ring.
        at_once: rings that share the bytes.
    """
    rounds = 2 * (members - 1)
    if not rounds:
        return INFINITE
    return Link(link.bytes_per_s * members * at_once / rounds, rounds * link.latency_s)
