"""One process of several that are given different things, PROCESS COUNT PORT: prints a line per
thing, then trains.

In each variant the processes but the first have something else; each prints what it is told.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from tests.hosts.worker import begun

WIDTH, LAYERS = 4, 4


def pipeline(odd: str) -> tuple[jvpipe.Pipeline, Callable[[], jvpipe.State], Any]:
    """A pipeline, what begins a run, and a batch; one thing is odd."""
    table = np.ones(WIDTH, np.float32)
    table[-1] += odd == "closed-over array"
    act = jnp.sin if odd == "loss code" else jnp.tanh

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        x = batch["x"] * table
        for w in params["layers"]:
            x = act(x @ w)
        if odd == "mistake in the loss":
            x = x @ jnp.ones((WIDTH + 1, 1))
        return jnp.mean((x - batch["y"]) ** 2), state

    def init(key: Any) -> Any:
        keys = jax.random.split(key, LAYERS)
        scale = 0.25 if odd == "init" else 0.5
        return {"layers": [scale * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys]}

    optimizers = {
        "optimizer": optax.adam(0.1),
        "its rate": optax.sgd(1.0, momentum=0.9),
        "its beginning": optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1)),
    }
    params: Any = {"layers": [np.full((WIDTH, WIDTH), 0.1, np.float32) for _ in range(LAYERS)]}
    if odd == "parameters":
        params["layers"][2][1, 3] = 0.2
    batch = {name: np.ones((16 if odd == "batch size" else 8, WIDTH), np.float32) for name in "xy"}
    if odd == "batch":
        batch["y"][0, 0] = 2.0
    pipe = jvpipe.Pipeline(
        loss_fn,
        optimizers.get(odd, optax.sgd(0.1, momentum=0.9)),
        stages=3 if odd == "stages" else 2,
        microbatches=2 if odd == "micro-batches" else 4,
        schedule="gpipe" if odd == "schedule" else "1f1b",
        planner="nobody" if odd == "mistake" else "even",
        memory_limit="1GiB" if odd == "memory limit" else None,
        has_state=True,
    )
    made = init if odd in ("init", "init as it is") else params
    key, count = jax.random.key(odd == "key"), {"n": np.float32(odd == "model state")}
    return pipe, lambda: pipe.init(made, batch, key, count), batch


def main(arguments: Sequence[str]) -> None:
    process, count, port, *variants = arguments
    begun(int(process), int(count), int(port))
    jax.config.update("jax_platforms", "cpu")
    for variant in variants:
        usual = "init as it is" if variant == "init" else ""
        told = "nothing"
        try:
            pipeline(variant if int(process) else usual)[1]()
        except Exception as error:
            told = str(error).splitlines()[0]
        print(json.dumps([variant, told]), flush=True)
    pipe, begin, batch = pipeline("")
    state, metrics = begin(), {}
    for _ in range(3):
        state, metrics = pipe.step(state, batch)
    print(json.dumps(["trained", float(metrics["loss"]).hex()]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
