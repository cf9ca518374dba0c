"""How the devices at hand differ: by what each reports or may hold, and by speeds that are given or measured."""

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jvpipe._jax import Device, is_own
from jvpipe.cost.costs import Costs
from jvpipe.cost.presets import accelerator_like
from jvpipe.ir.brief import brief
from jvpipe.ir.given import is_whole, several
from jvpipe.ir.sizes import limits_of_each
from jvpipe.runtime.hosts import Hosts

ALIKE = 0.98
"""Devices that report at least this share of what the roomiest of them has are taken to have the same."""


def checked_speeds(speeds: Any, devices: int) -> tuple[float, ...]:
    """How fast each device is beside the others; none if nobody says.

    >>> checked_speeds(np.array([2, 1]), 2)
    (2.0, 1.0)
    >>> checked_speeds([2, 0], 2)
    Traceback (most recent call last):
    ValueError: speeds [2, 0]: each must be a number above 0, such as [2.0, 1.0] for a device twice as fast as the other
    """
    if speeds is None:
        return ()
    usual = "such as [2.0, 1.0] for a device twice as fast as the other"
    given: list[Any] = (
        [speeds] if isinstance(speeds, str | Mapping | Set) else several(speeds) or [speeds]
    )
    numbers = all(
        (is_whole(x) or isinstance(x, float | np.floating)) and 0 < x < math.inf for x in given
    )
    if not numbers:
        raise ValueError(f"speeds {brief(speeds)}: each must be a number above 0, {usual}")
    if len(given) != devices:
        raise ValueError(f"{len(given)} speeds for {devices} devices: give one for each, {usual}")
    return tuple(float(x) for x in given)


def given_slowness(
    speeds: Sequence[float], first: int, device: int, layers: int
) -> tuple[float, ...]:
    """How many times longer a device takes for each layer than the first one; nothing if as long.

    Args:
        speeds: of all devices; none: they are alike.
        first: the device that layers are measured on.
        device: in question.
        layers: how many there are.

    >>> given_slowness([2.0, 1.0], 0, 1, 3), given_slowness([2.0, 1.0], 0, 0, 3)
    ((2.0, 2.0, 2.0), ())
    """
    alike = not speeds or speeds[first] == speeds[device]
    return () if alike else (speeds[first] / speeds[device],) * layers


def measured_slowness(
    devices: Sequence[Device], measured_on: Callable[[Device], Costs], costs: Costs
) -> list[tuple[float, ...]]:
    """How many times longer each device takes for each layer than the first one: layers are timed once per kind.

    Args:
        devices: in question. What another process has is judged by its products per second.
        measured_on: times layers on a device.
        costs: as the first one takes.
    """
    first_s = [layer.forward_s + layer.backward_s for layer in costs.layers]
    known: dict[str, tuple[float, ...]] = {_kind(devices[0]): ()}
    for device in devices:
        if _kind(device) in known:
            continue
        if is_own(device):
            other_s = (layer.forward_s + layer.backward_s for layer in measured_on(device).layers)
            known[_kind(device)] = tuple(
                b / a if a else 1.0 for a, b in zip(first_s, other_s, strict=True)
            )
        else:
            rates = [
                accelerator_like(_kind(x), x.platform).products_per_s("float32")
                for x in (devices[0], device)
            ]
            known[_kind(device)] = (rates[0] / rates[1],) * len(first_s)
    return [known[_kind(device)] for device in devices]


def _kind(device: Device) -> str:
    return getattr(device, "device_kind", "")


def device_limits(
    given: int | tuple[int, ...] | None,
    devices: Sequence[Device],
    planned: int,
    hosts: Hosts | None,
) -> tuple[int, ...]:
    """What each device may hold: as given, else as it reports; none if it does not (CPUs).

    Args:
        given: one limit for all devices, or one for each that is planned for. Others may hold as much as the least.
        devices: that there are.
        planned: so many of them, the first ones.
        hosts: the processes of the run, if there are several.

    Raises:
        ValueError: there are more or fewer limits than devices.
    """
    if given is None or hosts is not None:  # all tell, for one of them may be given no limit
        reported = reported_limits(devices, hosts)
        if given is None:
            return reported
    if isinstance(given, int) or len(given) == len(devices):
        return limits_of_each(given, len(devices))
    each = limits_of_each(given, planned)
    return (*each, *(min(each),) * (len(devices) - len(each)))


def reported_limits(devices: Sequence[Device], hosts: Hosts | None = None) -> tuple[int, ...]:
    """The memory that each device of all processes reports, those that have nearly the same alike."""
    told_by = {device.id: _reported(device) for device in devices if is_own(device)}
    limits = {at: limit for at, limit in told_by.items() if limit is not None}
    if hosts is not None:
        told = hosts.exchange("devices' memory", json.dumps(list(limits.items())).encode())
        limits = {at: limit for process in told for at, limit in json.loads(process)}
    if not limits:
        return ()
    each = [limits.get(device.id, min(limits.values())) for device in devices]
    return tuple(min(other for other in each if other >= ALIKE * limit) for limit in each)


def _reported(device: Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")
