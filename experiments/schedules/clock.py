"""The seconds of steps of a pipeline."""

import statistics
import time
from typing import Any

import jax


def timed(pipe: Any, state: Any, batch: Any, steps: int) -> tuple[list[float], list[float]]:
    """The seconds of each of so many steps, which are waited for one by one, and of their
    dispatch.
    """
    taken_s, dispatched_s = [], []
    for _ in range(steps):
        start_s = time.perf_counter()
        state, _ = pipe.step(state, batch)
        dispatched_s.append(time.perf_counter() - start_s)
        jax.block_until_ready(state)
        taken_s.append(time.perf_counter() - start_s)
    return taken_s, dispatched_s


def step_s(pipe: Any, state: Any, batch: Any, *, warm: int, steps: int) -> float:
    """The median of so many steps, after so many that do not count; each is waited for."""
    taken_s, _ = timed(pipe, state, batch, warm + steps)
    return statistics.median(taken_s[warm:])
