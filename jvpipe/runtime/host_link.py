"""The link between processes: copies of two sizes that go from the first one to the second and back, timed."""

import json
import statistics
import time

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.cost.effort import MEASURING
from jvpipe.cost.hardware import Link
from jvpipe.cost.links import link_through
from jvpipe.runtime.hosts import Hosts

_SIZES = (2**12, 2**24)  # bytes


def link_between(hosts: Hosts) -> Link:
    """The link between two processes, taken to be that between the first two; measured once, and told to all."""
    if hosts.link is None:
        seconds = [_seconds(hosts, size) for size in _SIZES]
        (told, *_) = hosts.exchange("link", json.dumps(seconds).encode())
        hosts.link = link_through(_SIZES, json.loads(told))
    return hosts.link


def _seconds(hosts: Hosts, size: int) -> float:
    """The median seconds of a copy from the first process to the second, of the first; 0 of all others."""
    hosts.connected.begin()
    if hosts.process > 1:
        return 0.0
    (device, *_), other, taken = jax.local_devices(), 1 - hosts.process, []
    like = _jax.placed(jax.ShapeDtypeStruct((size,), np.uint8), device)
    sent = [
        jax.device_put(np.full(size, i, np.uint8), device, may_alias=False)
        for i in range(MEASURING.host_copies)
    ]
    jax.block_until_ready(sent)
    for i, array in enumerate(sent):
        start_s = time.perf_counter()
        there, back = 2 * i, 2 * i + 1
        if hosts.process == 0:
            hosts.connected.offer(other, there, array)
            hosts.connected.ask(other, back, like).block_until_ready()
        else:
            hosts.connected.offer(other, back, hosts.connected.ask(other, there, like))
        taken.append((time.perf_counter() - start_s) / 2)
    return statistics.median(taken[1:])
