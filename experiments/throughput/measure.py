"""Times one way to train, in a process of its own; prints one JSON object.

Usage: NPROC=1 python -m experiments.throughput.measure (jit | scan | gpipe | 1f1b | replicas | 2:1
| dispatch) DEVICES
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from experiments.throughput import data, model


def seconds(
    step: Callable[[], None],
    warm: int = 2,
    runs: int = 6,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median of `runs` steps after `warm` ones."""
    taken = []
    for _ in range(warm + runs):
        start = clock()
        step()
        taken.append(clock() - start)
    return statistics.median(taken[warm:])


def jit_per_micro_batch() -> dict[str, Any]:
    """jit(value_and_grad) per micro-batch, gradients added by another jit."""
    params, batch = jax.device_put(data.transformer_params()), data.transformer_batch()
    grad = jax.jit(jax.value_and_grad(model.transformer_loss))
    add = jax.jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b), donate_argnums=0)

    def step() -> None:
        sums = None
        for m in range(data.MICRO_BATCHES):
            at = slice(m * data.MICRO_BATCH, (m + 1) * data.MICRO_BATCH)
            _, g = grad(params, jax.tree.map(lambda x, at=at: x[at], batch), None)
            sums = g if sums is None else add(sums, g)
        jax.block_until_ready(sums)

    return {"step_s": seconds(step)}


def one_scan() -> dict[str, Any]:
    """One jit with a scan over the micro-batches."""
    params, batch = jax.device_put(data.transformer_params()), data.transformer_batch()

    @jax.jit
    def run(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(data.MICRO_BATCHES, -1, *x.shape[1:]), batch)

        def body(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            loss, g = jax.value_and_grad(model.transformer_loss)(params, part, None)
            return jax.tree.map(jax.numpy.add, sums, g), loss

        return jax.lax.scan(body, jax.tree.map(jax.numpy.zeros_like, params), parts)

    return {"step_s": seconds(lambda: jax.block_until_ready(run(params, batch)))}


def pipeline(schedule: str, stages: int, replicas: tuple[int, ...] | None = None) -> dict[str, Any]:
    """jvpipe, with plain SGD so that the update weighs as little as in the others, which have
    none.
    """
    import optax

    import jvpipe

    start = time.perf_counter()
    loss_fn, micro = model.transformer_loss, data.MICRO_BATCHES
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), stages, micro, schedule, replicas=replicas, group=True
    )
    batch = data.transformer_batch()
    state = pipe.init(data.transformer_params(), batch, None)

    step = stepper(pipe, state, batch)
    step()
    first_s = time.perf_counter() - start
    found = {
        "first_s": first_s,
        "programs": len(pipe.session.compiled.executables),
        "cuts": pipe.plan.cuts,
    }
    return {"step_s": seconds(step), "busy_s": seconds(step, clock=time.process_time)} | found


def dispatch() -> dict[str, Any]:
    """Microseconds per task: 8 layers, S=4, M=8, Adam; step wall time over 64, for 2 to 6 arrays
    per layer.

    The slope is per array of a task. In turns with it, what a jit call of 20 arrays takes: 25
    microseconds on the machine of the bounds (45 per task, 2 per array), so that other machines can
    be compared.
    """
    import optax

    import jvpipe

    batch, steps = model.chain_batch(), {}
    for arrays in (2, 4, 6):
        pipe = jvpipe.Pipeline(
            model.chain_loss,
            optax.adam(1e-3),
            stages=4,
            microbatches=8,
            planner="even",
            group=False,
        )
        steps[arrays] = stepper(pipe, pipe.init(model.chain_params(arrays), batch, None), batch)
    rounds, jit_us = [], []
    for _ in range(15):
        jit_us.append(jit_call_us())
        rounds.append({n: seconds(step, warm=20, runs=50) / 64 * 1e6 for n, step in steps.items()})
    found = {n: statistics.median(each[n] for each in rounds) for n in steps}
    # A task runs two layers: one array more in each layer is two more in the task.
    slope_us, jit_us = (found[6] - found[2]) / 8, statistics.median(jit_us)
    return {"task_us": found[2], "slope_us": slope_us, "by_arrays_us": found, "jit_us": jit_us}


def jit_call_us() -> float:
    """Microseconds of a jit call that takes and gives 20 small arrays."""
    arrays = [jax.numpy.ones((4, 4))] * 20
    call = jax.jit(lambda *xs: [x + 1 for x in xs])

    def calls() -> None:
        for _ in range(500):
            call(*arrays)

    return seconds(calls, runs=9) / 500 * 1e6


def stepper(pipe: Any, state: Any, batch: Any) -> Callable[[], None]:
    """A function that takes one step and waits for it."""

    def step() -> None:
        nonlocal state
        state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)

    return step


def main() -> None:
    """Runs one measurement; each stage has one device, or as many as its replicas."""
    way, devices = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", devices)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "jit": jit_per_micro_batch,
        "scan": one_scan,
        "dispatch": dispatch,
        "replicas": lambda: pipeline("1f1b", 1, (devices,)),
        "2:1": lambda: pipeline("1f1b", 2, (2, 1)),
    }
    found = ways[way]() if way in ways else pipeline(way, devices)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
