"""The bytes that devices and the host may hold, as the user gives them or JAX reports them."""

import os
from collections.abc import Sequence
from itertools import chain

from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.util.devices import Device, is_own
from jvpipe.util.sizes import GIB, limits_of_each

_ALIKE = 0.98
"""Nearly equal limits count as equal: each device gets the smallest reported limit that is at
least this share of the limit that the device itself reports."""
_WHOLE = 0.92
"""The share of a GPU's reported memory that a plan may fill. The rest is left for gaps
between arrays in the allocator."""
_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable that says how many GiB of host memory JAX pins for GPUs."""


def device_limits(
    limits: int | tuple[int, ...] | None,
    devices: Sequence[Device],
    planned: int,
    hosts: Hosts | None,
) -> tuple[int, ...]:
    """Returns each device's limit in bytes; empty if no limit is given and none reported (CPUs).

    Args:
        limits: one limit for all devices; or one for each device; or one for each device of the
            plan (other devices get the smallest of the given limits). None: what devices report.
        devices: all devices of the run.
        planned: how many devices the plan uses; they come first in `devices`.
        hosts: the processes of the run, if there are several.

    Raises:
        ValueError: there are more or fewer limits than devices.
    """
    # Even a process with a given limit must exchange reports, because a process without a
    # given limit waits for the reports of all processes.
    if limits is None or hosts is not None:
        reported = reported_limits(devices, hosts)
        if limits is None:
            return reported
    if isinstance(limits, int) or len(limits) == len(devices):
        return limits_of_each(limits, len(devices))
    of_planned = limits_of_each(limits, planned)
    others = len(devices) - len(of_planned)
    return of_planned + (min(of_planned),) * others


def reported_limits(devices: Sequence[Device], hosts: Hosts | None = None) -> tuple[int, ...]:
    """Returns the limits in bytes that devices report, with nearly equal limits made equal.

    Args:
        devices: all devices of the run.
        hosts: the processes of the run, if there are several. Each sends the others the
            limits of its own devices.

    Returns:
        A limit for each device; empty if no device reports a limit.
    """
    limits = {
        device.id: limit
        for device in devices
        if is_own(device) and (limit := _reported(device)) is not None
    }
    if hosts is not None:
        by_process = hosts.exchange_json("devices' memory", list(limits.items()))
        limits = dict(chain.from_iterable(by_process))
    if not limits:
        return ()
    # A device that reports no limit gets the smallest reported limit.
    by_device = [limits.get(device.id, min(limits.values())) for device in devices]

    def of_alike(limit: int) -> int:
        """Returns the smallest of the limits that count as equal to a limit."""
        return min(x for x in by_device if x >= _ALIKE * limit)

    return tuple(map(of_alike, by_device))


def _reported(device: Device) -> int | None:
    """Returns the bytes that a plan may use on a device; None if the device reports none."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(_WHOLE * limit) if limit and device.platform == "gpu" else limit


def host_limit(asked: int | None, devices: Sequence[Device]) -> int | None:
    """Returns how many bytes the host may hold for all devices; None if there is no limit.

    Args:
        asked: the limit that the user gives. If it is None and there are GPUs, the limit is
            the sum of what JAX lets each process with GPUs pin in host memory.
        devices: the devices of all processes.

    Raises:
        ValueError: the environment variable `_PINNED` is not a whole number.
    """
    processes = {device.process_index for device in devices if device.platform == "gpu"}
    if asked is not None or not processes:
        return asked
    pinned = os.environ.get(_PINNED, "64")
    if not pinned.isdecimal():
        raise ValueError(f"{_PINNED}='{pinned}' must be a whole number of GiB, such as 64")
    return len(processes) * int(pinned) * GIB
