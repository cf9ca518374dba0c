"""How long steps wait for a checkpoint.

    python -m experiments.faults.beside [--width 1448] [--rounds 4]

Twelve square layers under Adam, on two CPU devices. A checkpoint is a copy to the host, for which
the next step waits, and a write, which goes on beside the steps; both are timed, and so are steps
alone and beside a write.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from jvpipe.session.checkpoints import snapshot

LAYERS, STEPS = 12, 5


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What an act gives, and its seconds."""
    begin = time.perf_counter()
    return act(), time.perf_counter() - begin


class Steps:
    """Steps of a model of this width."""

    def __init__(self, width: int) -> None:
        def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        def init(key: jax.Array) -> Any:
            return [
                jax.random.normal(k, (width, width)) / width**0.5
                for k in jax.random.split(key, LAYERS)
            ]

        self.pipe = jvpipe.Pipeline(
            loss_fn, optax.adam(1e-3), stages=2, planner="even", group=False
        )
        self.batch = np.ones((64, width), np.float32)
        self.state = self.pipe.init(init, self.batch, jax.random.key(0))

    def one_s(self) -> float:
        """The seconds of one more."""

        def step() -> None:
            self.state, _ = self.pipe.step(self.state, self.batch)
            self.pipe.wait(self.state)

        return timed(step)[1]


def main() -> None:
    """Prints a row per round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1448)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    steps = Steps(given.width)
    print(
        f"{3 * 4 * LAYERS * given.width**2 / 2**20:.0f} MiB\n\n| copy, s | write, s | step alone, "
        "s | beside a write |"
    )
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            alone = median(steps.one_s() for _ in range(STEPS))
            copied, copy_s = timed(lambda: snapshot(steps.pipe.session, steps.state, {}))
            _, write_s = timed(lambda copied=copied: copied.write(Path(folder) / "saved"))
            thread = threading.Thread(target=copied.write, args=(Path(folder) / "beside",))
            thread.start()
            beside = []
            while thread.is_alive():
                beside.append(steps.one_s())
            print(
                f"| {copy_s:.2f} | {write_s:.2f} | {alone:.2f} | {median(beside):.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
