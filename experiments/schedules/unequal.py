"""Two sleeping devices, one twice as fast: simulated and measured steps. python -m
experiments.schedules.unequal
"""

import argparse
import sys
from typing import Any, NamedTuple

import jax

from experiments.schedules.clock import step_s

LAYERS, MICRO, WARM, STEPS = 12, 8, 2, 5
WIDTH, EXAMPLES = 16, 64
FORWARD_S, BACKWARD_S = 12e-3, 24e-3
SPEEDS = ((2.0, 1.0), (1.0, 2.0))
"""Of device 0 and device 1."""
ROOM = 0.75
"""What a device twice as fast may hold under a limit, of what it does without one; the other 11/24
of it.
"""
BOUND = 0.05


class Row(NamedTuple):
    """A plan's layers, by stage and device, seconds of a step, simulated and measured, and peak
    bytes by device.
    """

    placed: str
    simulated_s: float
    measured_s: float
    peaks: list[int]


def main() -> None:
    """The table; the exit code is 1 if a step is off by more than the bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "gpipe", "interleaved", "auto"])
    jax.config.update("jax_num_cpu_devices", 2)
    print(
        "| schedule | speeds | limits | layers, by stage | simulated, s | measured, s | ratio | "
        "blind, s | peaks |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for schedule in parser.parse_args().schedules:
        for speeds in SPEEDS:
            blind = one(schedule, speeds, told=False)
            free = one(schedule, speeds)
            room = int(ROOM * max(free.peaks))
            limits = tuple(room if speed == max(speeds) else room * 11 // 24 for speed in speeds)
            for limit in (None, limits) if schedule != "interleaved" else (None,):
                row = free if limit is None else one(schedule, speeds, limit=limit)
                ratio = row.measured_s / row.simulated_s
                worst = max(worst, abs(ratio - 1))
                shown = (
                    f"{row.simulated_s:.3f} | {row.measured_s:.3f} | {ratio:.3f} | "
                    f"{blind.measured_s:.3f}"
                )
                told = f"{speeds[0]:g}:{speeds[1]:g} | {'none' if limit is None else list(limit)}"
                print(f"| {schedule} | {told} | {row.placed} | {shown} | {row.peaks} |", flush=True)
                assert limit is None or all(
                    held <= most for held, most in zip(row.peaks, limit, strict=True)
                )
    print(f"\nmeasured steps are off by {worst:.1%} at most (bound: {BOUND:.0%})")
    sys.exit(worst > BOUND)


def one(schedule: str, speeds: tuple[float, ...], *, told: bool = True, limit: Any = None) -> Row:
    """Plans for the speeds, or as if devices were alike, and trains."""
    import optax

    import jvpipe
    from experiments.migration import naps

    for device, speed in enumerate(speeds):
        naps.set_slowness(device, max(speeds) / speed)
    pipe = jvpipe.Pipeline(
        naps.loss_fn(FORWARD_S, BACKWARD_S),
        optax.sgd(0.1),
        stages=2,
        microbatches=MICRO,
        schedule=schedule,
        memory_limit=limit,
        speeds=speeds if told else None,
        group=False,
    )
    batch = naps.batch(EXAMPLES * MICRO, WIDTH)
    state = pipe.init(naps.params(LAYERS, WIDTH), batch, None)
    measured_s = step_s(pipe, state, batch, warm=WARM, steps=STEPS)
    planned = pipe.session.compiled_plans.planned
    assert planned is not None
    placed = " ".join(
        f"{len(stage.layers)} on {stage.devices[0]}," for stage in pipe.plan.stages
    ).rstrip(",")
    return Row(placed, planned.step_s, measured_s, list(pipe.ledger.peak[:2]))


if __name__ == "__main__":
    main()
