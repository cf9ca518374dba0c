"""Two devices that are not alike: each keeps its own limit, the faster one gets more layers, the
bits stay.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

LAYERS, WIDTH, STEPS = 8, 16, 2
PARAMS = [
    np.random.default_rng(i).normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
    for i in range(LAYERS)
]
BATCH = np.random.default_rng(99).normal(size=(64, WIDTH)).astype(np.float32)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


def trained(**options: Any) -> tuple[jvpipe.Pipeline, list[float]]:
    pipe = jvpipe.Pipeline(loss_fn, optax.adamw(1e-2), 2, 8, **options)
    state, losses = pipe.init(PARAMS, BATCH, None), []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    jax.block_until_ready(state)
    return pipe, losses


@pytest.fixture(scope="module")
def plain() -> tuple[int, list[float]]:
    pipe, losses = trained()
    return max(pipe.ledger.peak_bytes.values()), losses


@pytest.mark.thorough
@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "auto"])
def test_each_device_keeps_its_own_limit(schedule: str, plain: tuple[int, list[float]]) -> None:
    peak, losses = plain
    small = 3 * peak // 4 if schedule == "interleaved" else peak // 2
    for limits in ((2 * peak, small), (small, 2 * peak))[: 1 + (schedule == "1f1b")]:
        pipe, ours = trained(memory_limit=limits, schedule=schedule)
        held = [pipe.ledger.peak_bytes[device] for device in jax.devices()[:2]]
        assert all(size <= limit for size, limit in zip(held, limits, strict=True))
        assert ours == losses  # to the bit
        assert "micro-batches pass device" in pipe.explain()


def test_the_faster_device_gets_more_layers() -> None:
    wide = [np.eye(256, dtype=np.float32)] * 6
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(1e-2), 2, 4, speeds=[1.0, 3.0])
    pipe.init(wide, np.ones((1024, 256), np.float32), None)
    layers = {stage.devices[0]: len(stage.layers) for stage in pipe.plan.stages}
    assert layers[1] > layers[0]
    assert "layers take 0.33 times as long" in pipe.explain()


def test_a_limit_that_cannot_be_kept_names_the_device_and_limits_that_would_do(
    plain: tuple[int, list[float]],
) -> None:
    with pytest.raises(
        jvpipe.MemoryLimitExceeded, match=r"device \d \(.*\), which may hold [\d,]+ bytes, would"
    ) as refused:
        trained(memory_limit=[plain[0], 1000])
    trained(memory_limit=refused.value.smallest_limit_bytes)
    plan = jvpipe.Plan.from_cuts([4, 4])
    pipe = jvpipe.Pipeline(loss_fn, optax.adamw(1e-2), plan, 8, memory_limit=[plain[0], 1000])
    with pytest.raises(
        jvpipe.MemoryLimitExceeded, match=f"{jax.devices()[1]} would hold .* the limit is 1,000"
    ):
        pipe.init(PARAMS, BATCH, None)


def test_a_plan_whose_stages_go_another_way_round(plain: tuple[int, list[float]]) -> None:
    plan = jvpipe.Plan.from_cuts([3, 5], devices=[1, 0])
    pipe = jvpipe.Pipeline(loss_fn, optax.adamw(1e-2), plan, 8)
    state = pipe.init(PARAMS, BATCH, None)
    losses = []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses == plain[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"memory_limit": ["1GiB"]},
            r"1 memory limits \(1.00 GiB\) for 2 devices: give one for each device",
        ),
        ({"memory_limit": "1GiB,2GiB,3GiB"}, "3 memory limits .* for 2 devices"),
        ({"memory_limit": [None, 5]}, "give one size for all devices, or one for each"),
        ({"speeds": [1.0, 0.0]}, "each must be a number above 0"),
        ({"speeds": [1.0]}, "1 speeds for 2 devices"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        jvpipe.Pipeline(loss_fn, optax.adamw(1e-2), 2, 8, **options)
