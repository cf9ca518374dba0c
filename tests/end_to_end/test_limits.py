"""A memory limit holds: training runs under it with the same bits, and just below the smallest one
it says so.
"""

from dataclasses import replace
from typing import Any

import jax
import optax
import pytest

import jvpipe
from jvpipe.cost.costs import LayerCost
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Fate
from jvpipe.planners.model.problem import Problem
from jvpipe.session.measuring import Measurement
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.zoo import dropped, quick_key

MICRO, STEPS = 8, 2
CASE = dropped("chain", quick_key(7), depth=4)


def timed(layer: LayerCost) -> LayerCost:
    """The layer with seconds of 1 and 2, and as much more as it computes again."""
    options = tuple(
        replace(option, extra_s=0.1 * list(option.fates.values()).count(Fate.RECOMPUTE))
        for option in layer.options
    )
    return replace(layer, forward_s=1.0, backward_s=2.0, options=options)


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Any:
    """Every plan is decided on the same costs, whose bytes are real and whose seconds are not:
    those of a busy machine would move cuts.
    """
    known: list[Problem] = []
    problem_of = Measurement.problem

    def problem(self: Measurement) -> Problem:
        if not known:
            found = problem_of(replace(self, settings=replace(self.settings, limits=(1, 1))))
            costs = replace(found.costs, layers=tuple(map(timed, found.costs.layers)))
            known.append(replace(found, costs=costs))
        return replace(known[0], memory_limit_bytes=max(self.settings.limits, default=None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurement, "problem", problem)
        yield


def start(limit: int | None, **options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = jvpipe.Pipeline(
        CASE.loss_fn,
        optax.adamw(1e-2),
        stages=2,
        microbatches=MICRO,
        schedule="gpipe",
        memory_limit=limit,
        devices=jax.devices()[:2],
        **options,
    )
    return pipe, pipe.init(CASE.params, batch_of(CASE, MICRO), key_of(CASE), CASE.state)


def refused(limit: int) -> int:
    """The smallest limit that would do, as the error says."""
    with pytest.raises(
        jvpipe.MemoryLimitExceeded, match="bytes would do; so may more stages"
    ) as raised:
        start(limit)
    return raised.value.smallest_limit_bytes


def trained(limit: int | None) -> tuple[jvpipe.Pipeline, list[float]]:
    pipe, state = start(limit)
    losses = []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, batch_of(CASE, MICRO))
        losses.append(float(metrics["loss"]))
    pipe.evaluate(state, batch_of(CASE, MICRO))
    jax.block_until_ready(state)
    return pipe, losses


@pytest.mark.usefixtures("copies_never_late")
def test_three_limits_from_the_defaults_peak_down_to_the_smallest_hold() -> None:
    default, losses = trained(None)
    peak, smallest = max(default.ledger.peak[:HOST]), refused(1_000)
    assert smallest < 0.9 * peak
    for share in (1, 0.5, 0):
        limit = smallest + round(share * (peak - smallest))
        pipe, ours = trained(limit)
        assert ours == losses  # to the bit
        assert max(pipe.ledger.peak[:HOST]) <= limit
        assert pipe.ledger.peak == [
            found.bytes for found in pipe.session.compiled.peaks
        ]  # as simulated
        assert any(stage.fates for stage in pipe.plan.stages) == (limit < peak)
    assert refused(smallest - 1) == smallest


def test_a_host_limit_is_kept() -> None:
    pipe, _ = start(None, fates={"*": "swap"})
    on_host = pipe.session.compiled.peaks[HOST].bytes
    assert on_host > 0
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="the host would hold"):
        start(None, fates={"*": "swap"}, host_memory_limit=on_host - 1)


def test_explain_says_what_is_not_kept() -> None:
    pipe, _ = start(None, fates={"*": "recompute"})
    assert "; recompute " in pipe.explain()
