"""The links of the devices at hand: copies of two sizes, timed alone and together.

OUT goes from a device to the pinned memory of its host, IN back, SEND to another device.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jvpipe._jax import Device
from jvpipe.cost.archive import Archive, surroundings
from jvpipe.cost.effort import MEASURING
from jvpipe.cost.hardware import INFINITE, Link

_SMALL, _LARGE = 2**16, 2**24  # bytes
_SHARED = 1.5  # two copies that take so much longer together than the longer one alone share a link

Copy = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Links:
    """The measured links of a device; `send_uses_host` says that sending slows down swapping out."""

    out: Link
    back: Link
    send: Link
    send_uses_host: bool

    @property
    def numbers(self) -> list[float]:
        """The links as numbers; what takes no time is 0."""
        links = (self.out, self.back, self.send)
        rates = [0.0 if link == INFINITE else link.bytes_per_s for link in links]
        return [*rates, *(link.latency_s for link in links), float(self.send_uses_host)]

    @staticmethod
    def of(numbers: Sequence[float]) -> "Links":
        """Makes links of what `numbers` gave."""
        out, back, send = (
            Link(r, late) if r else INFINITE
            for r, late in zip(numbers[:3], numbers[3:6], strict=True)
        )
        return Links(out, back, send, bool(numbers[6]))

    @property
    def host(self) -> Link:
        """Out and back as one link, that of the slower."""
        return Link(
            min(self.out.bytes_per_s, self.back.bytes_per_s),
            max(self.out.latency_s, self.back.latency_s),
        )


@cache
def known_links() -> dict[tuple[str, str], Links]:
    """The links that this process has measured, by the kinds of their devices."""
    return {}


def links_between(
    device: Device, other: Device | None = None, archive: Archive | None = None
) -> Links:
    """The links of a device of this kind, also to one of another's kind; measured once per process.

    Args:
        device: whose links.
        other: to which it sends; None: no other device.
        archive: where they may be found, and are kept.
    """
    links, archive, kinds = (
        known_links(),
        archive or Archive(),
        (device.device_kind, other.device_kind if other else ""),
    )
    if kinds not in links:
        links[kinds] = Links.of(
            archive.numbers(
                lambda: ("links", surroundings(device), *kinds),
                7,  # see Links.numbers
                lambda: measure_links(device, other).numbers,
            )
        )
    return links[kinds]


def measure_links(
    device: Device, other: Device | None = None, sizes: tuple[int, int] = (_SMALL, _LARGE)
) -> Links:
    """Times a device's links; without another device, sending takes no time.

    Each copy is of its own array, so that no copy is answered from an earlier one.

    Args:
        device: whose links.
        other: a device to send to.
        sizes: bytes of a small and of a large copy.
    """
    pinned, here = (
        SingleDeviceSharding(device, memory_kind=kind) for kind in (_host_memory(device), None)
    )
    copies: list[Copy] = [lambda x: jax.device_put(x, pinned), lambda x: jax.device_put(x, here)]
    places = [here, pinned]
    if other is not None:
        copies.append(lambda x: jax.device_put(x, SingleDeviceSharding(other)))
        places.append(here)
    taken = []
    for copy, place in zip(copies, places, strict=True):
        arrays = [_arrays(size, place) for size in sizes]
        taken.append([_seconds([copy], [sample]) for sample in arrays])
    links = [link_through(sizes, sample) for sample in taken]
    shared = False
    if other is not None:
        together = _seconds(
            [copies[0], copies[2]], [_arrays(sizes[1], here), _arrays(sizes[1], here)]
        )
        shared = together > _SHARED * max(taken[0][1], taken[2][1])
    return Links(links[0], links[1], links[2] if other is not None else INFINITE, shared)


def _host_memory(device: Device) -> str:
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else device.default_memory().kind


def _arrays(size: int, place: SingleDeviceSharding) -> list[jax.Array]:
    """An array per run, and one to warm up."""
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return jax.block_until_ready(
        [jax.device_put(values, place, may_alias=False) for _ in range(MEASURING.copies + 1)]
    )


def _seconds(copies: Sequence[Copy], arrays: Sequence[Sequence[jax.Array]]) -> float:
    """The median time until all of the copies, begun one after another, are there."""
    taken = []
    for run in zip(*arrays, strict=True):
        start = time.perf_counter()
        jax.block_until_ready([copy(x) for copy, x in zip(copies, run, strict=True)])
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def link_through(sizes: tuple[int, int], taken: Sequence[float]) -> Link:
    """The line through the seconds of copies of two sizes; it is never faster than the large one, and never late."""
    per_byte = (taken[1] - taken[0]) / (sizes[1] - sizes[0])
    if per_byte <= 0:
        return Link(sizes[1] / taken[1])
    return Link(1 / per_byte, max(taken[0] - per_byte * sizes[0], 0.0))
