"""One process of a measurement; process 0 prints one JSON object.

Usage: python -m experiments.hosts.measure PROCESS COUNT PORT STAGES WIDTH | python -m
experiments.hosts.measure PROCESS COUNT PORT crossing
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from jvpipe.runtime.engine.hosts import Hosts, present_hosts
from jvpipe.util.devices import placed

ROWS = {32: 8, 256: 64, 768: 256}
"""Examples of a micro-batch by width: edges of 1 KB, 64 KB and 768 KB."""
MICROBATCHES, LAYERS_PER_STAGE = 8, 2
WARM, STEPS = 5, 20
SIZES = (2**12, 2**20, 2**24)
CROSSINGS = 12


def loss_fn(params: list[Any], batch: dict[str, Any], rng: Any) -> Any:
    """A chain of layers."""
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def step_s(stages: int, width: int) -> dict[str, Any]:
    """Seconds of a step of 1F1B, and bits of the last loss."""
    rng, examples = np.random.default_rng(0), ROWS[width] * MICROBATCHES
    params = [
        rng.normal(size=(width, width)).astype(np.float32) / width**0.5
        for _ in range(stages * LAYERS_PER_STAGE)
    ]
    batch = {name: rng.normal(size=(examples, width)).astype(np.float32) for name in ("x", "y")}
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), stages, MICROBATCHES, planner="even", group=False
    )
    state = pipe.init(params, batch, None)
    taken, metrics = [], {}
    for _ in range(WARM + STEPS):
        start_s = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        pipe.wait(state)
        taken.append(time.perf_counter() - start_s)
    return {"step_s": statistics.median(taken[WARM:]), "loss": float(metrics["loss"]).hex()}


def crossing_s(hosts: Hosts, size: int) -> float:
    """Median seconds of a copy to the other process: half of there and back."""
    (device, *_), other, taken = jax.local_devices(), 1 - hosts.process, []
    like = placed(jax.ShapeDtypeStruct((size,), np.uint8), device)
    hosts.connected.begin()
    for i in range(CROSSINGS):
        array = jax.block_until_ready(
            jax.device_put(np.full(size, i, np.uint8), device, may_alias=False)
        )
        hosts.exchange("turn", b"")
        start_s = time.perf_counter()
        if hosts.process == 0:
            hosts.connected.offer(2 * i, array)
            hosts.connected.ask(other, 2 * i + 1, like).block_until_ready()
        else:
            hosts.connected.offer(2 * i + 1, hosts.connected.ask(other, 2 * i, like))
        taken.append((time.perf_counter() - start_s) / 2)
        hosts.exchange("turn", b"")
    return statistics.median(taken[2:])


def main() -> None:
    """Measures as one of so many processes."""
    process, count, port = map(int, sys.argv[1:4])
    stages = 2 if sys.argv[4] == "crossing" else int(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", stages // count)
    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, process, cluster_detection_method="deactivate"
        )
    if sys.argv[4] == "crossing":
        hosts = present_hosts()
        assert hosts is not None
        hosts.connect()
        measured: Any = {size: crossing_s(hosts, size) for size in SIZES}
    else:
        measured = step_s(stages, int(sys.argv[5]))
    if process == 0:
        print(json.dumps(measured))
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
