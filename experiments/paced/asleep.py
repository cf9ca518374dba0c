"""Layers that sleep, simulated against measured: NPROC=1 python -m experiments.paced.asleep [--only
CASE]

A layer's forward and backward, and its update, sleep in a foreign call
(`experiments/migration/nap.cc`), so that eight devices keep two cores idle. Simulated are the rows
of a step, whose programs are measured one by one; of a stream, the stages that planners count with.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.schedules.clock import step_s
from jvpipe.cost.measure import measure_programs
from jvpipe.ir.kinds import KINDS, CopyLink
from jvpipe.ir.rows import Row
from jvpipe.simulate.simulator import simulate

FORWARD_S, BACKWARD_S, UPDATE_S, WIDTH = 0.03, 0.06, 0.05, 32
STEPS, BOUND = 7, 0.03


class Case(NamedTuple):
    """A pipeline of sleeping layers.

    Attributes:
        name: of the case.
        layers: that sleep.
        microbatches: of a step.
        update_s: what the update of a layer sleeps.
        width: of a layer; its gradients have its square.
        options: of the pipeline.
    """

    name: str
    layers: int
    microbatches: int
    update_s: float
    width: int
    options: dict[str, Any]


def cases() -> Iterator[Case]:
    """Yields the cases: what is computed again, updates, and the sums of replicas."""
    for schedule in ("gpipe", "1f1b"):
        options = {"stages": 8, "schedule": schedule, "checkpoint": "always"}
        yield Case(f"again, {schedule}", 8, 4, 0.0, WIDTH, {**options, "planner": "torchgpipe"})
    for schedule in ("1f1b", "pipedream"):
        options = {"stages": 4, "schedule": schedule, "planner": "torchgpipe"}
        yield Case(f"updates, {schedule}", 8, 8, UPDATE_S, WIDTH, options)
    for replicas in ((2, 2), (4,)):
        options = {"stages": len(replicas), "replicas": replicas, "planner": "jvpipe"}
        yield Case(f"replicas {replicas}", 8, 4, 0.0, 1024, options)


def loss_of(sleep: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes the loss of a chain of layers that sleep in their forwards and their backwards.

    Not the examples sleep but the weights, for replicas must be able to tell examples apart:
    cotangents are multiplied by a one that comes late, behind what the forward has made.

    Args:
        sleep: a copy that takes so long.
    """

    @jax.custom_vjp
    def nap(w: jax.Array) -> jax.Array:
        return sleep(w, FORWARD_S)

    def forward(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        late = sleep(w, FORWARD_S)
        return late, late[:1, :1]

    def backward(late: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        return (g * sleep(1 + 0 * late, BACKWARD_S),)

    nap.defvjp(forward, backward)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch
        for w in params:
            x = x + jnp.tanh(x @ nap(w))
        return jnp.mean(x**2)

    return loss_fn


def sleeping(sleep: Callable[..., jax.Array], seconds: float) -> optax.GradientTransformation:
    """Makes gradient descent whose update of each parameter sleeps.

    Args:
        sleep: a copy that takes so long.
        seconds: how long; 0: it does not sleep.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: sleep(g, seconds) if seconds else g, updates), state

    none = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.chain(none, optax.sgd(0.1))


def run(case: Case) -> tuple[float, float]:
    """Returns what a step is said to take, and what it took, the median of some.

    Args:
        case: to be run.
    """
    import jvpipe
    from experiments.migration.naps import sleep

    draw = np.random.default_rng(0)
    scale = case.width**-0.5
    shape = (case.width, case.width)
    params = [draw.normal(size=shape, scale=scale).astype(np.float32) for _ in range(case.layers)]
    batch = draw.normal(size=(4 * case.microbatches, case.width)).astype(np.float32)
    optimizer = sleeping(sleep, case.update_s)
    pipe = jvpipe.Pipeline(
        loss_of(sleep), optimizer, microbatches=case.microbatches, group=False, **case.options
    )
    state = pipe.init(params, batch, jax.random.key(0))
    assert len(pipe.session.compiled.graph.layers) == case.layers, (
        "each sleeps in a layer of its own"
    )
    planned = pipe.session.compiled_plans.planned
    assert planned is not None, "a planner was asked"
    simulated_s = planned.step_s
    if pipe.session.compiled.schedule.synchronous:
        simulated_s = by_rows_s(pipe)
    else:
        # A stream has no end of a step: all that its steps take, but for those that fill it.
        run_s = []
        for steps in (2, 2 + STEPS):
            start_s = time.perf_counter()
            *_, (state, _) = pipe.run(state, [batch] * steps, num_steps=steps)
            jax.block_until_ready(state)
            run_s.append(time.perf_counter() - start_s)
        return simulated_s, (run_s[1] - run_s[0]) / STEPS
    return simulated_s, step_s(pipe, state, batch, warm=1, steps=STEPS)


def by_rows_s(pipe: Any) -> float:
    """Returns the simulated seconds of a step's rows, whose programs are measured.

    Args:
        pipe: that has compiled a step.
    """
    compiled, link = pipe.session.compiled, pipe.session.compiled_plans.planned.problem.peer
    lowered = compiled.lowered
    computing = [row for row in lowered.rows if KINDS[row.kind].computes]
    programs = {id(row): compiled.row_programs.program(lowered, row) for row in computing}
    runs = measure_programs(compiled.store, list(programs.values()), jax.devices()[0])

    def seconds_of(row: Row) -> float:
        if id(row) in programs:
            return runs[programs[id(row)].key].seconds
        sent = row.writes if KINDS[row.kind].link is CopyLink.PEER else ()
        return link.seconds(sum(lowered.buffers[b].bytes for b in sent))

    return simulate(lowered, seconds_of).step_s


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    only = parser.parse_args().only
    jax.config.update("jax_num_cpu_devices", 8)
    print("| case | simulated, s | measured, s | measured / simulated |\n|---|---|---|---|")
    worst = 0.0
    for case in cases():
        if only not in case.name:
            continue
        simulated_s, measured_s = run(case)
        worst = max(worst, abs(measured_s / simulated_s - 1))
        told = f"{simulated_s:.3f} | {measured_s:.3f} | {measured_s / simulated_s:.3f}"
        print(f"| {case.name} | {told} |", flush=True)
    print(f"\nthe simulated step is off by {worst:.1%} at most (bound: {BOUND:.0%})")


if __name__ == "__main__":
    main()
