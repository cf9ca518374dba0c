"""What an idle device gives the others: CPU devices of one process share a pool of workers, others share nothing."""

import math
import statistics
import time
from collections.abc import Sequence

import jax

from jvpipe._jax import Device
from jvpipe.cost.archive import Archive, surroundings
from jvpipe.cost.effort import MEASURING
from jvpipe.cost.measure import example_of
from jvpipe.programs.store import Program, ProgramStore


def lent_share(alone_s: float, together_s: float, devices: int) -> float:
    """Tells what share of an idle device's time the others use.

    Args:
        alone_s: what a program takes on one device while the others are idle.
        together_s: until all devices have run it, begun at once.
        devices: how many these are.

    >>> lent_share(20.0, 20.0, 2), lent_share(20.0, 40.0, 2), lent_share(20.0, 30.0, 2)
    (0.0, 1.0, 0.5)
    """
    return min(max((together_s / alone_s - 1) / (devices - 1), 0.0), 1.0)


def measured_lending(
    store: ProgramStore, program: Program, devices: Sequence[Device], archive: Archive | None = None
) -> float:
    """Runs a program on one device, and on all at once: see `lent_share`; 0 for devices that are not CPUs.

    Args:
        store: where it is compiled.
        program: that overwrites nothing.
        devices: those of the pipeline.
        archive: where the share may be found, and is kept.
    """
    if len(devices) < 2 or devices[0].platform != "cpu":
        return 0.0
    return (archive or Archive()).numbers(
        lambda: (
            "lent",
            surroundings(devices[0]),
            str(len(devices)),
            store.text(program, devices[0]),
        ),
        1,
        lambda: [_measured(store, program, devices)],
    )[0]


def _measured(store: ProgramStore, program: Program, devices: Sequence[Device]) -> float:
    runs = store.compile([(program, device) for device in devices])
    inputs = [[jax.device_put(example_of(a), device) for a in program.inputs] for device in devices]

    def taken_s(count: int, times: int) -> float:
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        for _ in range(times):
            jax.block_until_ready(
                [run(*arguments) for run, arguments in zip(runs[:count], inputs, strict=False)]
            )
        return time.perf_counter() - start

    taken_s(len(devices), 1)
    times = math.ceil(MEASURING.lending_turn_s / taken_s(1, 1))
    shares = [
        lent_share(
            taken_s(1, times), taken_s(len(devices), times), len(devices)
        )  # the machine is as fast for both
        for _ in range(MEASURING.lending_turns)
    ]
    return statistics.median(shares)
