"""A quarter of the layers moves: live, and by stop and reboot: NPROC=1 python -m
experiments.migration.move
"""

import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

LAYERS, WIDTH, MICRO, FORWARD_S, BACKWARD_S = 16, 512, 8, 2e-3, 4e-3
OLD, NEW = [6, 10], [10, 6]  # mirror images: neither is faster
AT = MICRO // 2
ROUNDS = 6


@dataclass
class Step:
    """When each micro-batch of a step was done, from the step's start; how long the step took and
    devices were idle.

    `copies_s` are the seconds of the arrays that moved, from when each could leave until it was
    seen to be there.
    """

    done_s: list[float]
    step_s: float
    idle_s: float
    copies_s: float


def main() -> None:
    """The table of steps, then of ways to move."""
    jax.config.update("jax_num_cpu_devices", 2)
    logging.getLogger("absl").setLevel(logging.ERROR)
    import optax

    import jvpipe
    from experiments.migration import naps
    from jvpipe.cost.links import measure_links
    from jvpipe.programs.store import shared_store

    old, new = jvpipe.Plan.from_cuts(OLD), jvpipe.Plan.from_cuts(NEW)
    batch = naps.batch(4 * MICRO, WIDTH)
    loss_fn = naps.loss_fn(FORWARD_S, BACKWARD_S)

    def pipeline(plan: jvpipe.Plan) -> jvpipe.Pipeline:
        return jvpipe.Pipeline(loss_fn, optax.adam(1e-3), plan, MICRO, planner="even", group=False)

    pipe = pipeline(old)
    state = pipe.init(naps.params(LAYERS, WIDTH), batch, None)
    pipe.session.monitor()
    link = measure_links(*jax.devices()).send

    def step(state: Any) -> tuple[Any, Step]:
        start_s = time.perf_counter()
        state, _ = pipe.step(state, batch)
        pipe.wait(state)
        return state, seen(pipe.session.measured().spans, start_s, time.perf_counter())

    found: dict[str, list[Step]] = {"old": [], "moving": [], "new": [], "moving back": []}
    asked_s = []
    for _ in range(ROUNDS + 1):  # the first compiles, and does not count
        for name, plan in (("old", None), ("moving", new), ("new", None), ("moving back", old)):
            start_s = time.perf_counter()
            if plan:
                state = pipe.migrate(state, plan, at=(state.step, AT))
                asked_s.append(time.perf_counter() - start_s)
            state, done = step(state)
            found[name].append(done)
    found = {name: steps[1:] for name, steps in found.items()}
    own_s = LAYERS * (FORWARD_S + BACKWARD_S)
    inside = [change for change in pipe.session.history if change.how == "inside"]
    assert len(inside) == len(pipe.session.history), "each move was made inside its step"
    moved_bytes, layers = inside[0].moved_bytes, len(inside[0].layers)
    live = [*found["moving"], *found["moving back"]]
    link_ms, asked_ms = 1e3 * link.seconds(moved_bytes), 1e3 * statistics.median(asked_s[2:])
    copies_ms = 1e3 * statistics.median(step.copies_s for step in live)
    print(
        f"{layers} of {LAYERS} layers move before micro-batch {AT}: {moved_bytes:,} bytes, "
        f"{link_ms:.1f} ms of the link at {link.bytes_per_s / 1e9:.2f} GB/s, {copies_ms:.1f} ms "
        f"measured; lowered and bound in {asked_ms:.0f} ms. A micro-batch's own time: "
        f"{1e3 * own_s:.0f} ms.\n"
    )
    print("| step | " + " | ".join(f"{m}" for m in range(MICRO)) + " | step | idle |")
    print("|---" * (MICRO + 3) + "|")
    for name, steps in found.items():
        print(f"| {name} | " + " | ".join(f"{1e3 * s:.0f}" for s in figures(steps)) + " |")
    still = [min(pair) for pair in zip(figures(found["old"]), figures(found["new"]), strict=True)]
    worst = 0.0
    for name in ("moving", "moving back"):
        delays = [
            [s - without for s, without in zip(one.done_s, still, strict=False)]
            for one in found[name]
        ]
        worst = max(worst, *(max(delay) for delay in delays))
        shown = [statistics.median(column) for column in zip(*delays, strict=True)]
        print(f"| {name}: delay | " + " | ".join(f"{1e3 * s:+.0f}" for s in shown) + " | | |")
    print(
        f"\nthe latest micro-batch of {2 * ROUNDS} moves: {1e3 * worst:.0f} ms (bound: "
        f"{1e3 * own_s:.0f})\n"
    )
    step_s, idle_s = still[-2:]
    print("| way | step with it, s | longer, s | devices idle longer, s |")
    print("|---|---|---|---|")
    moved_s, moved_idle_s = (
        statistics.median(values)
        for values in zip(*((s.step_s, s.idle_s) for s in live), strict=True)
    )
    print(
        f"| live, inside a step | {moved_s:.3f} | {moved_s - step_s:.3f} | "
        f"{moved_idle_s - idle_s:.3f} |"
    )
    with tempfile.TemporaryDirectory() as folder:
        for way in ("reboot, programs known", "reboot, programs compiled again"):
            if "again" in way:
                shared_store.cache_clear()
                jax.clear_caches()
            path = Path(folder) / way
            start_s = time.perf_counter()
            pipe.save(path, state)
            pipe = pipeline(new if pipe.plan.cuts == tuple(OLD) else old)
            state = pipe.restore(path)
            pipe.session.monitor()
            state, _ = pipe.step(state, batch)
            pipe.wait(state)
            taken_s = time.perf_counter() - start_s
            more_s = taken_s - step_s
            print(f"| {way} | {taken_s:.3f} | {more_s:.3f} | {2 * more_s:.3f} |", flush=True)


def seen(spans: Any, start_s: float, end_s: float) -> Step:
    """What the measured timeline says: a micro-batch is done when its last backward is."""
    work = [span for span in spans if span.kind in ("F", "B", "R")]
    done = dict.fromkeys(range(MICRO), 0.0)
    for span in work:
        m = int(span.name.split(span.kind)[1])
        done[m] = max(done[m], span.end_s - start_s)
    busy_s = sum(span.end_s - span.start_s for span in work)
    copies_s = sum(span.end_s - span.start_s for span in spans if span.kind == "MOVE")
    return Step(list(done.values()), end_s - start_s, 2 * (end_s - start_s) - busy_s, copies_s)


def figures(steps: list[Step]) -> list[float]:
    """Medians: of each micro-batch, of the step, of the devices' idle seconds."""
    return [
        statistics.median(column)
        for column in zip(*([*s.done_s, s.step_s, s.idle_s] for s in steps), strict=True)
    ]


if __name__ == "__main__":
    main()
