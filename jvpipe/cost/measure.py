"""What layers cost on the device at hand: each distinct layer is run and timed once."""

import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import Device
from jvpipe.programs.store import Program, ProgramStore

_RUNS = 5


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of each layer's forward and backward on one micro-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def total_s(self) -> list[float]:
        """Forward and backward together."""
        return [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]


def measure_layers(store: ProgramStore, programs: Sequence[tuple[Program, Program]], device: Device) -> LayerSeconds:
    """Times each layer's forward and backward; layers that share a program are timed once."""
    store.compile([(program, device) for pair in programs for program in pair])
    known: dict[Hashable, float] = {}
    for pair in programs:
        for program in pair:
            if program.key not in known:
                known[program.key] = _seconds(store.compile([(program, device)])[0], program, device)
    return LayerSeconds(
        tuple(known[forward.key] for forward, _ in programs), tuple(known[backward.key] for _, backward in programs)
    )


def _seconds(executable: Any, program: Program, device: Device) -> float:
    """The median of a few runs after one to warm up; inputs are made anew, for a program may overwrite them."""
    taken = []
    for _ in range(_RUNS + 1):
        inputs = [jax.device_put(_example(a), device, may_alias=False) for a in program.inputs]
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        jax.block_until_ready(executable(*inputs))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _example(shape: jax.ShapeDtypeStruct) -> Any:
    """Values of no consequence, but no zeros: these are faster than real ones on some devices."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape.shape)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return np.zeros(shape.shape, shape.dtype)
    return np.random.default_rng(0).uniform(-1, 1, shape.shape).astype(shape.dtype)
