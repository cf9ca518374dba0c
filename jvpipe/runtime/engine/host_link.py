"""Measures the link between processes, by copies from the first process to the second and back."""

import statistics
import time

import jax
import numpy as np

from jvpipe.cost.hardware import Link
from jvpipe.cost.links import link_through
from jvpipe.cost.measuring_effort import MEASURING
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.util.devices import placed

_SIZES = (2**12, 2**24)
"""The bytes of the copies: the small ones show the latency, the large ones the bandwidth."""


def link_between(hosts: Hosts) -> Link:
    """Returns the latency and bandwidth of the link between any two processes.

    All processes make this call. The first call measures the link between the first two processes,
    and takes it as typical of all links. All processes get the first process's result.
    """
    if hosts.link is None:
        seconds = [_seconds(hosts, size) for size in _SIZES]
        (of_first, *_) = hosts.exchange_json("link", seconds)
        hosts.link = link_through(_SIZES, of_first)
    return hosts.link


def _seconds(hosts: Hosts, size: int) -> float:
    """Returns the median seconds of a copy from the first process to the second.

    Only the first process's result is meaningful. The clocks of two processes differ, so the first
    process times each copy to the second process and back, and halves the time.

    Args:
        hosts: the processes.
        size: the bytes of a copy.
    """
    transport = hosts.connected
    transport.begin()
    if hosts.process > 1:  # only counts the run, in `begin`, as the others do
        return 0.0
    (device, *_) = jax.local_devices()
    other = 1 - hosts.process
    like = placed(jax.ShapeDtypeStruct((size,), np.uint8), device)
    contents = (np.full(size, i, np.uint8) for i in range(MEASURING.host_copies))
    arrays = [jax.device_put(content, device, may_alias=False) for content in contents]
    jax.block_until_ready(arrays)
    seconds = []
    for i, array in enumerate(arrays):
        start_s = time.perf_counter()
        outward, back = 2 * i, 2 * i + 1
        if hosts.process == 0:
            transport.offer(outward, array)
            # A pause between two checks would count as latency.
            returned = transport.ask(other, back, like)
            hosts.come(returned, pause_s=0.0)
            returned.block_until_ready()
        else:
            transport.offer(back, transport.ask(other, outward, like))
        seconds.append((time.perf_counter() - start_s) / 2)
    return statistics.median(seconds[1:])
