"""A device that becomes slow, and one that only is noisy: NPROC=1 python -m
experiments.migration.follow
"""

import logging
import statistics
import sys
import time
from typing import Any

import jax

LAYERS, WIDTH, MICRO, FORWARD_S, BACKWARD_S = 12, 64, 4, 2e-3, 4e-3
NOISE, OUTLIERS = 0.1, 0.02
SLOW, STEPS = range(20, 40), 60
NOISY_STEPS = 200


def main() -> None:
    """The table of slow devices, then the noisy run."""
    jax.config.update("jax_num_cpu_devices", 2)
    if "-v" in sys.argv:
        logging.basicConfig(level=logging.INFO)
    noise = f"+-{NOISE:.0%} per task, {OUTLIERS:.0%} of the tasks 1 + gamma(2, 1) times as long"
    print(f"Device 1 is slow in steps {SLOW.start} to {SLOW.stop - 1}; noise {noise}.\n")
    print(
        "| slower | adapting | steps until repaired | then cuts | steps until it is back | "
        "s per step before | slow | modeled | after |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for factor in (1.5, 2.0):
        for on in (False, True):
            steps_s, history = trained(STEPS, factor, adapt=on)
            print(f"| {factor} | {row(factor, steps_s, history)} |", flush=True)
    steps_s, history = trained(NOISY_STEPS, 1.0, adapt=True)
    ratio = statistics.median(steps_s[NOISY_STEPS // 2 :]) / statistics.median(
        steps_s[5 : NOISY_STEPS // 2]
    )
    print(
        f"\n{NOISY_STEPS} steps under noise alone: {len(history)} migrations; second half over "
        f"first {ratio:.3f}"
    )


def trained(steps: int, factor: float, *, adapt: bool) -> tuple[list[float], list[Any]]:
    """Seconds of each step, and the migrations."""
    import optax

    import jvpipe
    from experiments.migration import naps

    naps.set_slowness(1, 1.0)
    naps.set_noise(NOISE, OUTLIERS)
    plan = jvpipe.Plan.from_cuts([LAYERS // 2] * 2)
    pipe = jvpipe.Pipeline(
        naps.loss_fn(FORWARD_S, BACKWARD_S),
        optax.sgd(0.1),
        plan,
        MICRO,
        planner="even",
        group=False,
    )
    batch = naps.batch(4 * MICRO, WIDTH)
    state = pipe.init(naps.params(LAYERS, WIDTH), batch, None)
    if adapt:
        pipe.adapt()
    taken = []
    for step in range(steps):
        naps.set_slowness(1, factor if step in SLOW else 1.0)
        start_s = time.perf_counter()
        state, _ = pipe.step(state, batch)
        pipe.wait(state)
        taken.append(time.perf_counter() - start_s)
    return taken, pipe.session.history


def row(factor: float, steps_s: list[float], history: list[Any]) -> str:
    """What happened, and the median seconds of steps: before, while the repaired plan ran, and once
    it was back.
    """
    away = [c for c in history if c.step in SLOW]
    back = [c for c in history if c.step >= SLOW.stop]
    before, after = steps_s[5 : SLOW.start], steps_s[SLOW.stop + 5 :]
    cuts = away[-1].new.cuts if away else (LAYERS // 2,) * 2
    parts_s = [n * (FORWARD_S + BACKWARD_S) * f for n, f in zip(cuts, (1.0, factor), strict=True)]
    modeled_s = (MICRO - 1) * max(parts_s) + sum(parts_s)
    found = ["no", "-", f"{cuts[0]}:{cuts[1]}", "-"]
    if away:
        repaired = " and ".join(str(c.step - SLOW.start) for c in away)
        found = ["yes", repaired, found[2], str(back[-1].step - SLOW.stop) if back else "never"]
    seconds = (
        statistics.median(before),
        statistics.median(steps_s[SLOW.start + 5 : SLOW.stop]),
        modeled_s,
    )
    return " | ".join([*found, *(f"{s:.3f}" for s in (*seconds, statistics.median(after)))])


if __name__ == "__main__":
    main()
