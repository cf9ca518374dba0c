"""The seconds of a step of a pipeline that is warm."""

import statistics
import time
from typing import Any

import jax


def step_s(pipe: Any, state: Any, batch: Any, *, warm: int, steps: int) -> float:
    """The median of so many steps, after so many that do not count; each is waited for."""
    taken = []
    for _ in range(warm + steps):
        start_s = time.perf_counter()
        state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[warm:])
