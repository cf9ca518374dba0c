"""No plan is slower where more is allowed: a sample of the ladders."""

import functools
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jvpipe
from experiments.planners.ladders import SAME, drawn, limits, slower

SLOW_NETWORK = """
device = { like = "v100-a" }
devices_per_machine = 4
machines = 2
host.bytes_per_s = 12e9
peer.bytes_per_s = 130e9
network.bytes_per_s = 125e6
"""
DEVICES = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(("schedule", "seeds"), [("1f1b", 4), ("zb-h1", 4), ("auto", 1)])
def test_a_looser_limit_is_never_slower(tmp_path: Path, schedule: str, seeds: int) -> None:
    for seed in range(seeds):
        path = tmp_path / "drawn.graph.txt"
        path.write_text(drawn(seed, (8, 12)))
        rungs = limits(path, schedule, stages=2, rungs=5)
        assert slower(rungs)[0] <= 1 + SAME, rungs


def test_more_devices_are_never_slower(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(SLOW_NETWORK)
    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)

    def loss_fn(params: list[jax.Array], batch: jax.Array, rng: jax.Array) -> jax.Array:
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, batch) ** 2)

    ask = functools.partial(jvpipe.plan_for, loss_fn, params, batch, hardware=str(file))
    steps_s = [ask(devices=devices).step_s for devices in DEVICES]
    assert all(b <= a * (1 + SAME) for a, b in pairwise(steps_s)), steps_s
