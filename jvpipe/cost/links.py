"""Measures the links of the devices at hand, by copies of two sizes.

OUT copies from a device to the pinned memory of its host, IN copies back to the device, and SEND
copies to another device. Each kind of copy is timed at two sizes, and the line through both points
gives rate and latency. OUT and SEND are also timed at once, to find out whether they share a link.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jvpipe.cost.archive import Archive, surroundings
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.measuring_effort import MEASURING
from jvpipe.util.devices import Device

_SMALL, _LARGE = 2**16, 2**24  # bytes


@dataclass(frozen=True, slots=True)
class Links:
    """The measured links of a device.

    Attributes:
        out: the link from the device to its host, which OUT uses.
        back: the link from the host to the device, which IN uses.
        send: the link to another device, which SEND uses.
        send_uses_host: whether SEND and OUT share a link, and so slow each other down.
    """

    out: Link
    back: Link
    send: Link
    send_uses_host: bool

    @property
    def numbers(self) -> list[float]:
        """The links as the seven numbers that the archive keeps; `Links.of` reads them back.

        They are three rates, three latencies, and whether SEND and OUT share a link. A link that
        takes no time has rate 0.
        """
        links = self.out, self.back, self.send
        rates = [0.0 if link == INFINITE else link.bytes_per_s for link in links]
        return [*rates, *(link.latency_s for link in links), float(self.send_uses_host)]

    @staticmethod
    def of(numbers: Sequence[float]) -> "Links":
        """Makes links from the list that `Links.numbers` returned."""
        rates = (rate or math.inf for rate in numbers[:3])
        out, back, send = map(Link, rates, numbers[3:6])
        return Links(out, back, send, bool(numbers[6]))

    @property
    def host(self) -> Link:
        """Both directions between device and host as one link, with the worse rate and latency."""
        rate = min(self.out.bytes_per_s, self.back.bytes_per_s)
        return Link(rate, max(self.out.latency_s, self.back.latency_s))


@cache
def known_links() -> dict[tuple[str, str], Links]:
    """Returns the links that this process has measured, by the kinds of sender and receiver.

    All calls return the same dict. `links_between` adds to it.
    """
    return {}


def links_between(
    device: Device,
    other: Device | None = None,
    archive: Archive | None = None,
) -> Links:
    """Returns the links of a device, which a process measures once for each pair of device kinds.

    Args:
        device: the device.
        other: the device to which it sends; None if it sends to no other device.
        archive: the archive that may have the links, and that keeps measured ones.
    """
    links = known_links()
    kinds = device.device_kind, other.device_kind if other else ""
    if kinds not in links:
        numbers = (archive or Archive()).numbers(
            lambda: ("links", surroundings(device), *kinds),
            7,  # see Links.numbers
            lambda: measure_links(device, other).numbers,
        )
        links[kinds] = Links.of(numbers)
    return links[kinds]


def measure_links(
    device: Device,
    other: Device | None = None,
    sizes: tuple[int, int] = (_SMALL, _LARGE),
) -> Links:
    """Times a device's links.

    Args:
        device: the device.
        other: the device to which it sends; None if it sends to no other device. The result then
            has `INFINITE` for `send`.
        sizes: the bytes of a small and of a large copy.
    """
    here = SingleDeviceSharding(device)
    kinds = {memory.kind for memory in device.addressable_memories()}
    host_kind = "pinned_host" if "pinned_host" in kinds else device.default_memory().kind
    pinned = SingleDeviceSharding(device, memory_kind=host_kind)

    def seconds(target: SingleDeviceSharding, source: SingleDeviceSharding) -> list[float]:
        return [_seconds([target], [_arrays(size, source)]) for size in sizes]

    out_s = seconds(pinned, here)
    out_link = link_through(sizes, out_s)
    back_link = link_through(sizes, seconds(here, pinned))
    if other is None:
        return Links(out_link, back_link, INFINITE, send_uses_host=False)
    there = SingleDeviceSharding(other)
    send_s = seconds(there, here)
    # Whether a link is shared is judged by large copies, in which latencies hardly count.
    large = [_arrays(sizes[1], here) for _ in range(2)]
    together_s = _seconds([pinned, there], large)
    shared = together_s > MEASURING.shared * max(out_s[1], send_s[1])
    return Links(out_link, back_link, link_through(sizes, send_s), shared)


def _arrays(size: int, place: SingleDeviceSharding) -> list[jax.Array]:
    """Makes an array for each run, and one to warm up.

    Each run copies its own array, because JAX may return an existing copy of an array.
    """
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    runs = range(MEASURING.copies + 1)
    return jax.block_until_ready([jax.device_put(values, place, may_alias=False) for _ in runs])


def _seconds(
    targets: Sequence[SingleDeviceSharding],
    arrays: Sequence[Sequence[jax.Array]],
) -> float:
    """Returns the median seconds until several copies, all begun at once, are done.

    Args:
        targets: the places to which the copies go that are timed together.
        arrays: for each copy, an array per run.
    """
    taken = []
    for run in zip(*arrays, strict=True):
        start = time.perf_counter()
        jax.block_until_ready(list(map(jax.device_put, run, targets)))
        # The first run warms up, and does not count.
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def link_through(sizes: tuple[int, int], taken: Sequence[float]) -> Link:
    """Returns the link whose rate and latency are those of the line through two timed copies.

    The latency is at least 0. If noise made the large copy as fast as the small one or faster, the
    link has the rate of the large copy, and no latency.

    Args:
        sizes: the bytes of the small and of the large copy.
        taken: the seconds of the small and of the large copy.
    """
    small, large = sizes
    small_s, large_s = taken
    per_byte = (large_s - small_s) / (large - small)
    if per_byte <= 0:
        return Link(large / large_s)
    latency_s = max(small_s - per_byte * small, 0.0)
    return Link(1 / per_byte, latency_s)
