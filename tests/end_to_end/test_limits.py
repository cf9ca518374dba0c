"""A memory limit holds: training runs under it with the same bits, and just below the smallest one it says so."""

from typing import Any

import jax
import optax
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.zoo import CASES

MICRO = 8


def start(limit: int | None, **options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    m = CASES["chained-keys"]()
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optax.adamw(1e-2),
        stages=2,
        microbatches=MICRO,
        schedule="gpipe",
        memory_limit=limit,
        devices=jax.devices()[:2],
        **options,
    )
    return pipe, pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state)


def trained(limit: int | None) -> tuple[jvpipe.Pipeline, list[float]]:
    pipe, state = start(limit)
    losses = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch_of(CASES["chained-keys"](), MICRO))
        losses.append(float(metrics["loss"]))
    pipe.evaluate(state, batch_of(CASES["chained-keys"](), MICRO))
    jax.block_until_ready(state)
    return pipe, losses


def test_limits_between_the_defaults_peak_and_the_smallest_hold() -> None:
    default, losses = trained(None)
    peak = max(default.ledger.peak[:HOST])
    with pytest.raises(jvpipe.MemoryLimitExceeded) as raised:
        start(1_000)
    smallest = raised.value.smallest_limit_bytes
    assert smallest < peak
    for limit in ((peak + smallest) // 2, smallest):
        pipe, ours = trained(limit)
        assert ours == losses  # to the bit
        assert max(pipe.ledger.peak[:HOST]) <= limit
        assert pipe.ledger.peak == [found.bytes for found in pipe.build.peaks]  # as simulated
        assert any(stage.fates for stage in pipe.plan.stages)
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="bytes would do; so may more stages"):
        start(int(0.9 * smallest))


def test_a_host_limit_is_kept() -> None:
    pipe, _ = start(None, fates={"*": "swap"})
    on_host = pipe.build.peaks[HOST].bytes
    assert on_host > 0
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="the host would hold"):
        start(None, fates={"*": "swap"}, host_memory_limit=on_host - 1)


def test_explain_says_what_is_not_kept() -> None:
    pipe, _ = start(None, fates={"*": "recompute"})
    assert "; recompute " in pipe.explain()
