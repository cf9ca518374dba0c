"""Measures the share of an idle device's time that other devices use.

The CPU devices of a process share a pool of worker threads, so an idle device lends its worker to
the others. Devices of other kinds share nothing.
"""

import math
import statistics
import time
from collections.abc import Sequence

import jax

from jvpipe.cost.archive import Archive, surroundings, usable_cores
from jvpipe.cost.example_inputs import example_of
from jvpipe.cost.measuring_effort import MEASURING
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.util.devices import Device, is_own


def lent_share(alone_s: float, together_s: float, devices: int) -> float:
    """Computes the share of an idle device's time that the other devices use.

    If no time is lent, all devices together take as long as one device alone. If all time is lent,
    a device that runs alone uses the cores of all devices. Then all devices together take `devices`
    times as long as one device alone. Between these two cases, the share is interpolated.

    Args:
        alone_s: the seconds of a program on one device while the others are idle.
        together_s: the seconds until all devices, which begin at once, have run the program.
        devices: the number of devices.

    >>> lent_share(20.0, 20.0, 2), lent_share(20.0, 40.0, 2), lent_share(20.0, 30.0, 2)
    (0.0, 1.0, 0.5)
    """
    share = (together_s / alone_s - 1) / (devices - 1)
    # Noise may put the share a little outside of 0 to 1.
    return min(max(share, 0.0), 1.0)


def devices_per_core(devices: Sequence[Device]) -> float:
    """Returns the number of CPU devices of this process per core; 0 without CPU devices.

    Args:
        devices: the devices of the pipeline, of which only the CPU devices of this process count.
    """
    sharing = sum(device.platform == "cpu" and is_own(device) for device in devices)
    return sharing / usable_cores()


def measured_lending(
    store: ProgramStore,
    program: Program,
    devices: Sequence[Device],
    archive: Archive | None = None,
) -> float:
    """Measures `lent_share` by running a program on one device, and on all devices at once.

    Args:
        store: the store that compiles the program.
        program: a program that donates no input, so that it can run again on the same arrays.
        devices: the devices of the pipeline.
        archive: the archive that may have the share, and that keeps a measured one.

    Returns:
        The share; 0 for one device alone, and for devices that are not CPUs.
    """
    first = devices[0]
    # Only CPU devices share cores.
    if len(devices) < 2 or first.platform != "cpu":
        return 0.0
    (share,) = (archive or Archive()).numbers(
        lambda: ("lent", surroundings(first), str(len(devices)), store.text(program, first)),
        1,
        lambda: [_measured(store, program, devices)],
    )
    return share


def _measured(store: ProgramStore, program: Program, devices: Sequence[Device]) -> float:
    """Returns the median of the shares that several turns measure."""
    runs = store.compile([(program, device) for device in devices])
    inputs = []
    for device in devices:
        examples = map(example_of, program.inputs)
        inputs.append([jax.device_put(example, device) for example in examples])
    calls = list(zip(runs, inputs, strict=True))
    count = len(devices)

    def taken_s(count: int, times: int) -> float:
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        for _ in range(times):
            jax.block_until_ready([run(*arguments) for run, arguments in calls[:count]])
        return time.perf_counter() - start

    taken_s(count, 1)  # warms up
    times = math.ceil(MEASURING.lending_turn_s / taken_s(1, 1))
    # Both ways are timed in every turn, so that a slow moment of the machine affects both.
    shares = [
        lent_share(taken_s(1, times), taken_s(count, times), count)
        for _ in range(MEASURING.lending_turns)
    ]
    return statistics.median(shares)
