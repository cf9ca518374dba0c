"""Programs are shared by devices where they are the same, and only there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import Device
from tests.compiled_once import MADE

HERE, THERE = jax.devices()[:2]
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_program_is_compiled_for_one_device_and_runs_on_another() -> None:
    program = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x + 12345.5, donate_argnums=0)
    compiled, (given, other) = len(MADE), (jax.device_put(ROWS, device) for device in (HERE, THERE))
    here, there = program(given), program(other)
    assert len(MADE) == compiled + 1
    assert there.devices() == {THERE}
    assert here.tobytes() == there.tobytes()
    assert given.is_deleted()
    assert other.is_deleted()


def test_what_is_loaded_takes_the_bytes_of_what_was_compiled() -> None:
    program = jax.jit(lambda x: jnp.sort(x, axis=0) @ jnp.sin(x).T)
    lowered = [program.lower(jax.device_put(ROWS, device)) for device in (HERE, THERE)]
    first, second = (each.compile().memory_analysis() for each in lowered)
    for name in ("argument_size", "output_size", "temp_size", "alias_size"):
        assert getattr(first, f"{name}_in_bytes") == getattr(second, f"{name}_in_bytes")


def test_programs_that_differ_in_one_number_of_a_long_constant_are_two() -> None:
    def last(number: float, device: Device) -> float:
        table = np.append(np.arange(10_000), number).astype(np.float32)
        scaled = jax.jit(lambda x: x * table)(jax.device_put(np.float32(1), device))
        return float(scaled[-1])

    assert (last(1.0, HERE), last(2.0, THERE)) == (1.0, 2.0)


@pytest.mark.parametrize("device", [HERE, THERE], ids=str)
def test_a_callback_calls_its_own_function(device: Device) -> None:
    seen: list[Any] = []

    def call(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return x + 1

    jax.block_until_ready(jax.jit(call)(jax.device_put(np.float32(7), device)))
    jax.effects_barrier()
    assert seen == [7.0]
