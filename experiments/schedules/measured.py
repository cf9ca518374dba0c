"""Measured against simulated steps of every family, while devices sleep: python -m experiments.schedules.measured"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import numpy as np

from experiments.schedules.clock import step_s

MICRO, WARM, STEPS, PER_DEVICE, NAPS = 8, 2, 6, 4, 20
WIDTH = 16
FAMILIES = ("gpipe", "1f1b", "interleaved", "interleaved-4", "zb-h1", "interleaved-split", "zb-v", "v-half")
LAYER_S = (5e-3, 5e-3, 5e-3)
"""Of a layer: F, I and W."""


def main() -> None:
    """The table, for two and for four devices."""
    jax.config.update("jax_num_cpu_devices", 4)
    print("| S | schedule | simulated, s | measured, s | ratio | over 1f1b | peak bytes, simulated | ledger |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for devices in (2, 4):
        usual_s = 0.0
        for name in ("1f1b", *FAMILIES):
            simulated_s, measured_s, peaks = one(devices, name)
            usual_s = usual_s or measured_s
            ratio = measured_s / simulated_s
            worst = max(worst, abs(ratio - 1))
            shown = f"{simulated_s:.4f} | {measured_s:.4f} | {ratio:.3f} | {measured_s / usual_s:.3f}"
            print(f"| {devices} | {name} | {shown} | {peaks[0]} | {peaks[1]} |", flush=True)
            assert peaks[0] == peaks[1], "the simulator and the ledger count alike"
    print(f"\nmeasured steps are off by {worst:.1%} at most (bound: 3%)")
    sys.exit(worst > 0.03)


def one(devices: int, name: str) -> tuple[float, float, tuple[list[int], list[int]]]:
    """Seconds of a step, simulated and measured, and the bytes of both on every device."""
    import optax

    import jvpipe
    from experiments.migration import naps
    from experiments.schedules import layers
    from jvpipe.simulate.rows import simulate

    count = PER_DEVICE * devices
    pipe = jvpipe.Pipeline(
        layers.loss_fn((LAYER_S,) * count), optax.sgd(0.1), devices, MICRO, schedule_of(name), planner="even"
    )
    batch = naps.batch(2 * MICRO, WIDTH)
    state = pipe.init(naps.params(count, WIDTH), batch, None)
    measured_s = step_s(pipe, state, batch, warm=WARM, steps=STEPS)
    compiled = pipe.session.compiled
    told = simulate(compiled.lowered, seconds_of(), temporary_bytes=compiled.step.temporary_bytes)
    peaks = list(told.peak_bytes[:devices]), list(pipe.ledger.peak[:devices])
    return told.step_s, measured_s, peaks


def schedule_of(name: str) -> Any:
    """The schedule of a name, also of one that no option of the command says."""
    from jvpipe.schedules.interleaved import Interleaved

    options = {"interleaved-4": {"chunks": 4}, "interleaved-split": {"split": True}}
    return Interleaved(**options[name]) if name in options else name


def seconds_of() -> Callable[[Any], float]:
    """What a row takes: what a layer sleeps, each time a little longer than it is told."""
    from experiments.migration.naps import sleep

    naps = jax.jit(lambda x: reduce(sleep, [LAYER_S[0]] * NAPS, x))
    x, taken = np.ones(4, np.float32), []
    for _ in range(7):
        start_s = time.perf_counter()
        naps(x).block_until_ready()
        taken.append((time.perf_counter() - start_s) / NAPS)
    late_s = statistics.median(taken[1:]) - LAYER_S[0]
    forward_s, input_s, weight_s = (seconds + late_s for seconds in LAYER_S)
    by_kind = {"F": forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s}
    return lambda row: by_kind.get(row.kind, 0.0) if row.layer >= 0 else 0.0


if __name__ == "__main__":
    main()
