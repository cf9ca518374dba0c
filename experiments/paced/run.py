"""Simulated against measured step seconds and peak bytes: NPROC=1 python -m
experiments.paced.run
"""

import statistics
import time

import jax

LAYERS, FORWARD_S, BACKWARD_S = 12, 2e-3, 4e-3
CUTS = ([6, 6], [8, 4], [9, 3])
MICRO_BATCHES = (4, 8, 32)


def main() -> None:
    """Plans by hand, so that uneven cuts are seen too; layers are measured on one device while the
    other runs too.
    """
    jax.config.update("jax_num_cpu_devices", 2)
    import optax

    import jvpipe
    from experiments.paced import layers
    from jvpipe.cost.measure import measured_costs
    from jvpipe.ir.plan import Plan
    from jvpipe.ir.rows import Row
    from jvpipe.simulate.simulator import simulate

    loss_fn, params = layers.paced_loss(((FORWARD_S, BACKWARD_S),) * LAYERS), layers.params(LAYERS)
    print(
        "| schedule | cuts | M | simulated, s | measured, s | ratio | peak bytes, simulated | "
        "ledger |"
    )
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for schedule in ("gpipe", "1f1b"):
        for cuts in CUTS:
            for micro in MICRO_BATCHES:
                plan = Plan.from_cuts(cuts)
                pipe = jvpipe.Pipeline(
                    loss_fn,
                    optax.sgd(0.1),
                    stages=plan,
                    microbatches=micro,
                    schedule=schedule,
                    planner="even",
                    group=False,
                )
                batch = layers.batch(2 * micro)
                state = pipe.init(params, batch, None)
                compiled = pipe.session.compiled
                simulated, taken, peak_bytes = [], [], ()
                for _ in range(
                    5
                ):  # layers and steps in turns, so that a slow moment of the machine hits both
                    costs = measured_costs(
                        compiled.traced, jax.devices()[0], compiled.store, fates=False
                    ).layers

                    def seconds_of(row: Row, costs: tuple = costs) -> float:
                        return {
                            "F": costs[row.layer].forward_s,
                            "B": costs[row.layer].backward_s,
                        }.get(row.kind, 0.0)

                    found = simulate(
                        compiled.lowered, seconds_of, temporary_bytes=compiled.step.temporary_bytes
                    )
                    simulated.append(found.step_s)
                    peak_bytes = found.peak_bytes
                    for _ in range(2):
                        start_s = time.perf_counter()
                        state, _ = pipe.step(state, batch)
                        jax.block_until_ready(state)
                        taken.append(time.perf_counter() - start_s)
                measured_s, simulated_s = statistics.median(taken[1:]), statistics.median(simulated)
                ratio = measured_s / simulated_s
                worst = max(worst, abs(ratio - 1))
                peaks = list(peak_bytes[:2]), list(pipe.ledger.peak[:2])
                shown = (
                    f"{simulated_s:.3f} | {measured_s:.3f} | {ratio:.3f} | {peaks[0]} | {peaks[1]}"
                )
                print(f"| {schedule} | {cuts[0]}:{cuts[1]} | {micro} | {shown} |", flush=True)
                assert peaks[0] == peaks[1], "the simulator and the ledger count alike"
    print(f"\nthe simulated step is off by {worst:.1%} at most (bound: 10%)")


if __name__ == "__main__":
    main()
