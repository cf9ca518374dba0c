"""Measured against simulated steps of every family, while devices sleep.

python -m experiments.schedules.measured
"""

import statistics
import sys
import time
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.schedules.clock import step_s

MICRO, WARM, STEPS, PER_DEVICE, NAPS = 8, 2, 6, 4, 20
WIDTH = 16
FAMILIES = (
    "gpipe",
    "interleaved",
    "interleaved-4",
    "zb-h1",
    "interleaved-split",
    "zb-v",
    "v-half",
    "auto",
)
NAP_S = 5e-3
"""What each of a layer's F, I and W sleeps."""
MOST_OFF, MOST_OVER = 0.03, 1.05
"""By how much a measured step may be off, and how many times what no order of its plan is below
`auto` may take.
"""


def main() -> None:
    """The table, for two and for four devices."""
    jax.config.update("jax_num_cpu_devices", 4)
    print(
        "| S | schedule | simulated, s | measured, s | ratio | over 1f1b | over the bound | peak "
        "bytes per device |"
    )
    print("|---|---|---|---|---|---|---|---|")
    off, over = 0.0, 0.0
    for devices in (2, 4):
        usual_s = 0.0
        for name in ("1f1b", *FAMILIES):
            one = measured(devices, name)
            usual_s = usual_s or one.measured_s
            ratio, auto_over = one.measured_s / one.simulated_s, one.measured_s / one.bound_s
            off, over = max(off, abs(ratio - 1)), max(over, auto_over * (name == "auto"))
            shown = [f"{one.simulated_s:.4f} | {one.measured_s:.4f} | {ratio:.3f}"]
            shown += [f"{one.measured_s / usual_s:.3f} | {auto_over:.3f} | {one.peak_bytes}"]
            print(f"| {devices} | {name} | {' | '.join(shown)} |", flush=True)
    print(f"\nmeasured steps are off by {off:.1%} at most (bound: {MOST_OFF:.0%})")
    print(
        f"auto takes {over:.3f} of what no order of its plan is below at most (bound: {MOST_OVER})"
    )
    sys.exit(off > MOST_OFF or over > MOST_OVER)


class Measured(NamedTuple):
    """Seconds of a step, simulated, measured, and what no order of its plan is below; peak bytes of
    each device.
    """

    simulated_s: float
    measured_s: float
    bound_s: float
    peak_bytes: list[int]


def measured(devices: int, name: str) -> Measured:
    """Measures a family; the simulator and the ledger have to count the same bytes."""
    import optax

    import jvpipe
    from experiments.migration import naps
    from experiments.schedules import layers
    from jvpipe.simulate.simulator import simulate

    count = PER_DEVICE * devices
    pipe = jvpipe.Pipeline(
        layers.loss_fn(((NAP_S, NAP_S, NAP_S),) * count),
        optax.sgd(0.1),
        devices,
        MICRO,
        schedule_of(name),
        planner="jvpipe" if name == "auto" else "even",
        group=False,
    )
    batch = naps.batch(2 * MICRO, WIDTH)
    state = pipe.init(naps.params(count, WIDTH), batch, None)
    taken_s = step_s(pipe, state, batch, warm=WARM, steps=STEPS)
    compiled = pipe.session.compiled
    nap_s = slept_s()
    told = simulate(
        compiled.lowered,
        lambda row: nap_s * naps_in(row.kind, row.layer),
        temporary_bytes=compiled.step.temporary_bytes,
    )
    peaks = list(told.peak_bytes[:devices])
    assert peaks == list(pipe.ledger.peak[:devices]), "the simulator and the ledger count alike"
    return Measured(told.step_s, taken_s, nap_s * least_naps(pipe.plan), peaks)


def schedule_of(name: str) -> Any:
    """The schedule of a name, also of one that no option of the command says."""
    from jvpipe.schedules.interleaved import Interleaved

    options = {"interleaved-4": {"chunks": 4}, "interleaved-split": {"split": True}}
    return Interleaved(**options[name]) if name in options else name


def naps_in(kind: str, layer: int) -> int:
    """How often a task of a layer sleeps; nobody asks the first layer for the cotangent of its
    input.
    """
    if layer < 0:
        return 0
    cotangent = int(layer > 0)
    return {"F": 1, "B": cotangent + 1, "I": cotangent, "W": 1}.get(kind, 0)


def least_naps(plan: Any) -> int:
    """What no order of a plan is below: of each device the work, and the forwards before the first
    of its layers.
    """
    naps, begins = dict[int, int](), dict[int, int]()
    for stage in plan.stages:
        (device,) = stage.devices
        begins.setdefault(device, stage.layers[0])
        each = sum(naps_in(kind, layer) for kind in "FB" for layer in stage.layers)
        naps[device] = naps.get(device, 0) + MICRO * each
    return max(naps[device] + begins[device] for device in naps)


def slept_s() -> float:
    """What a nap takes in a chain of them, a little longer than it is told."""
    from experiments.migration.naps import sleep

    chain = jax.jit(lambda x: reduce(sleep, [NAP_S] * NAPS, x))
    x, taken = np.ones(4, np.float32), []
    for _ in range(7):
        start_s = time.perf_counter()
        chain(x).block_until_ready()
        taken.append((time.perf_counter() - start_s) / NAPS)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
