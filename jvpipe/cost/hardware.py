"""The hardware as planners see it: devices, links, and clusters of machines with devices.

A link is a rate and a latency. All communication is described by links, so that code which counts
seconds deals with one type. The meaning of `size` in `Link.seconds(size)` depends on the link:

    a copy                                  the bytes that are copied
    an all-reduce (`reducing`)              the bytes of one summand
    a transfer of slices (`way`)            the bytes of the whole value, in all slices together
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
    """Raises ValueError for a number that no device or link can have; `what` is for the message."""
    positive = value > 0 or (zero and value == 0)  # NaN is neither
    if not positive or (math.isinf(value) and not infinite):
        least = "of at least 0" if zero else "above 0"
        finite = "" if infinite else " that is finite"
        raise ValueError(f"{name}={value!r} of {what} must be a number {least}{finite}")


@dataclass(frozen=True, slots=True)
class Link:
    """A connection that carries bytes in one direction.

    A transfer takes the latency plus the bytes divided by the rate. If the rate is infinite, it
    takes only the latency.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check("a link", "bytes_per_s", self.bytes_per_s, infinite=True)
        _check("a link", "latency_s", self.latency_s, zero=True)

    def seconds(self, size: int | float) -> float:
        """Returns the seconds that `size` bytes take; 0 bytes take no time, not even the latency.

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
        name: the name of the device.
        memory_bytes: the size of its memory.
        memory_bytes_per_s: the rate at which kernels read and write the memory.
        flops_per_s: the rate of matrix products, by dtype; with a `tiling`, the rate of products
            that keep all cores busy. Only `float32` must be there: `products_per_s` derives the
            rates of missing dtypes.
        launch_s: the fixed seconds that each kernel takes in addition to its work. A kernel that
            moves `launch_s * memory_bytes_per_s` bytes reaches half of the memory's rate, because
            launching takes as long as moving; kernels of fewer bytes reach less.
        elementwise_per_s: elementwise operations per second; a kernel takes at least the time of
            its operations at this rate.
        platform: `cuda`, `tpu` or `cpu`: the platform whose compiler makes the programs.
        cores: the multiprocessors of a GPU; 0 if the number is not known.
        tiling: how well products use the cores; None if they are assumed to use all cores always.
        framework: the framework that runs the programs, which decides how many kernels they have.
        scratch_bytes: the on-chip memory of a TPU, where small values lie.
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
        """Returns the rate of products of a dtype; if it is not listed, that of a similar dtype.

        >>> Accelerator("small", 10**9, 1e9, {"float32": 4e9}).products_per_s("float64")
        2000000000.0
        """
        listed = self.listed_dtype(dtype)
        is_double = dtype in ("float64", "complex128") and listed != dtype
        return self.flops_per_s[listed] / (2 if is_double else 1)

    def listed_dtype(self, dtype: str) -> str:
        """Returns the key of `flops_per_s` for a dtype: the dtype itself, or a similar dtype."""
        # Both types of 16 bits run on the same units. Types of double precision are assumed to
        # run at half the rate of float32, and all other types at the rate of float32.
        names = (dtype, _SUBSTITUTES.get(dtype, dtype))
        return next((name for name in names if name in self.flops_per_s), "float32")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines with devices, which are numbered machine by machine.

    Either all devices are alike, or `unlike` has an entry for each.

    Attributes:
        name: the name of the cluster.
        device: the device, if all are alike; otherwise the first device of `unlike`.
        devices_per_machine: the number of devices of each machine.
        machines: the number of machines.
        host: the link between each device and its host.
        peer: the link between two devices of a machine.
        network: the link between two machines.
        peer_uses_host: whether transfers between devices of a machine go through the links to the
            host (PCIe), which they then share with swapped tensors.
        host_memory_bytes: the host memory of each machine; None if there is no limit.
        unlike: all devices in the order of their numbers; empty if they are alike.
        networks: the number of network links of each machine, which its devices share.
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
        """The speeds and memory of every device, by its number.

        >>> small, large = (Accelerator(name, 10**9, 1e9, {}) for name in ("small", "large"))
        >>> [each.name for each in Cluster("mixed", large, 2, unlike=(large, small)).accelerators]
        ['large', 'small']
        """
        return self.unlike or (self.device,) * self.devices

    def machines_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Returns, for each of the given devices, the number of its machine."""
        return tuple(device // self.devices_per_machine for device in devices)

    def reducing(self, devices: Sequence[int]) -> Link:
        """Returns a link that takes as long as an all-reduce, given the bytes of one summand.

        Each device has a summand. The all-reduce has three phases, one after another:

            in each machine       reduce-scatter in a ring: each device gets the sum of one part
            between machines      the parts are summed up in rings across machines
            in each machine       all-gather in the first ring: each device gets all parts

        The machine with the most of the devices takes the longest for its ring, so it sets the time
        of the first and third phase. Every ring across machines needs a network link and a device
        of its own in each machine. So the number of rings that run at once is limited by the
        network links of a machine, and by the devices of the machine with the fewest devices.

        Args:
            devices: the numbers of the devices that take part.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 4, 2, peer=Link(8e9), network=Link(1e9))
        >>> [round(cluster.reducing(devices).seconds(8e9), 9) for devices in ([0, 1, 2, 3], [0, 4], [3])]
        [1.5, 8.0, 0.0]
        """
        if len(devices) < 2:
            return INFINITE
        devices_on = Counter(self.machines_of(devices))
        at_once = min(*devices_on.values(), self.networks)
        inside = _ring(self.peer, max(devices_on.values()))
        between = _ring(self.network, len(devices_on), at_once)
        # The phases follow one another, so their seconds per byte and their latencies add up.
        byte_s = 1 / inside.bytes_per_s + 1 / between.bytes_per_s
        bytes_per_s = 1 / byte_s if byte_s else math.inf
        return Link(bytes_per_s, inside.latency_s + between.latency_s)

    def least_reduce_s(self, count: int, size: int | float) -> float:
        """Returns a lower bound on the seconds of an all-reduce over at least `count` devices.

        The bound holds for any choice of devices. For each number of machines, it assumes that the
        devices are spread evenly, so that the ring of the fullest machine is as short as possible.
        It also assumes that as many rings as possible run between machines. The bound is the least
        time over all numbers of machines. It holds for more than `count` devices, too, because
        further devices only lengthen rings.

        Args:
            count: the number of devices.
            size: the bytes of one summand.

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
            per_machine = -(-count // machines)  # the devices of the fullest machine, at least
            if per_machine <= self.devices_per_machine:
                inside_s = _ring(self.peer, per_machine).seconds(size)
                between_s = _ring(self.network, machines, at_once).seconds(size)
                least_s = min(least_s, inside_s + between_s)
        return least_s

    def way(self, senders: Sequence[int], readers: Sequence[int]) -> Link:
        """Returns a link that takes as long as the transfer of a value, given the value's bytes.

        The value is cut into slices of equal size, one per sender. At any time, each sender sends
        at most one slice, and each reader receives at most one. Between machines, each slice on its
        way also needs a network link of its own, on the senders' side and on the readers' side.

        Args:
            senders: the numbers of the devices that hold the slices.
            readers: the numbers of the devices that receive them.

        >>> gpu = Accelerator("small", 10**9, 1e9, {})
        >>> cluster = Cluster("lab", gpu, 2, 2, peer=Link(4e9), network=Link(1e9))
        >>> cluster.way([0], [1]).seconds(8e9), cluster.way([0, 1], [2, 3]).seconds(8e9)
        (2.0, 8.0)
        """
        at = self.machines_of(senders)
        to = self.machines_of(readers)
        ways = min(len(at), len(to))
        link = self.peer
        # Nothing crosses the network if all devices are on one machine, or if the i-th sender and
        # the i-th reader are, for each i.
        if at != to and len({*at, *to}) > 1:
            crossing = self.networks * min(len({*at}), len({*to}))
            ways = min(ways, crossing)
            link = self.network
        return Link(link.bytes_per_s * ways, link.latency_s)


def _ring(link: Link, members: int, at_once: int = 1) -> Link:
    """Returns a link that takes as long as an all-reduce in a ring, given one summand's bytes.

    The bytes are cut into one part per member. Each part goes around the ring twice: first it is
    summed up, then the sum is handed out. Each time it passes all links except one. So there are
    2 (members - 1) rounds, and every link carries bytes / members in each round.

    Args:
        link: the link from one member to the next.
        members: the number of devices or machines in the ring.
        at_once: the number of rings that run at once and share the bytes.
    """
    rounds = 2 * (members - 1)
    if not rounds:
        return INFINITE
    return Link(link.bytes_per_s * members * at_once / rounds, rounds * link.latency_s)
