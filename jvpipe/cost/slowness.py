"""Compares the speeds of devices: for each layer, how many times longer one takes than another."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.presets import accelerator_of
from jvpipe.util.devices import Device, is_own

T = TypeVar("T")
Slowness = tuple[float, ...]
"""For each layer, the seconds of another device divided by those of the first device; empty if both
are equally fast.
"""


def work_s(layers: Iterable[LayerCost]) -> list[float]:
    """Returns the seconds of each layer's forward and backward."""
    return [layer.forward_s + layer.backward_s for layer in layers]


def given_slowness(speeds: Sequence[float], first: int, device: int, layers: int) -> Slowness:
    """Returns how many times longer a device takes per layer than the first; empty if equally fast.

    Args:
        speeds: the relative speeds of all devices; empty if all are equally fast.
        first: the number of the device on which layers are measured.
        device: the number of the other device.
        layers: how many layers there are.

    >>> given_slowness([2.0, 1.0], 0, 1, 3), given_slowness([2.0, 1.0], 0, 0, 3)
    ((2.0, 2.0, 2.0), ())
    """
    # Planners take devices as equal only if the slowness is empty, not if it consists of 1.0s.
    if not speeds or speeds[first] == speeds[device]:
        return ()
    return (speeds[first] / speeds[device],) * layers


def measured_slowness(
    devices: Sequence[Device], measured_on: Callable[[Device], Costs], costs: Costs
) -> list[Slowness]:
    """Returns, for each device and layer, how many times longer the device takes than the first.

    Args:
        devices: the devices; those of other processes are compared by their products per second.
        measured_on: a function that returns the costs of the layers on a device of this process.
        costs: the costs of the layers on the first device.
    """

    def longer(device: Device) -> Slowness:
        if is_own(device):
            return times_longer(costs, measured_on(device))
        # Layers cannot be timed on another process's device. Instead, all layers get the
        # ratio of the products per second of both kinds of device (`presets.py`).
        first, other = accelerator_of(devices[0]), accelerator_of(device)
        times = first.products_per_s("float32") / other.products_per_s("float32")
        return (times,) * len(costs.layers)

    return slowness_by_kind(devices, _kind, longer)


def _kind(device: Device) -> str:
    return getattr(device, "device_kind", "")


def slowness_by_kind(
    devices: Sequence[T], kind_of: Callable[[T], str], longer: Callable[[T], Slowness]
) -> list[Slowness]:
    """Returns the slowness of each device, found once per kind; empty for the first device's kind.

    Args:
        devices: the devices; the others are compared with the first one.
        kind_of: returns the kind of a device.
        longer: returns how many times longer a device takes for each layer than the first one.
    """
    kinds = list(map(kind_of, devices))
    by_kind: dict[str, Slowness] = {kinds[0]: ()}
    for device, kind in zip(devices, kinds, strict=True):
        # Timing all layers takes seconds, and devices of one kind are equally fast.
        if kind not in by_kind:
            by_kind[kind] = longer(device)
    return [by_kind[kind] for kind in kinds]


def times_longer(costs: Costs, other: Costs) -> Slowness:
    """Returns how many times longer each layer takes by `other` than by `costs`."""
    pairs = zip(work_s(costs.layers), work_s(other.layers), strict=True)
    return tuple(b / a if a else 1.0 for a, b in pairs)
