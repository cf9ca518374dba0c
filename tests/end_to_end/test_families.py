"""Schedules of several stages per device and of backwards in two halves: other orders, the same
bits, exact bytes.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import optax
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.ir.layers import LayerGraph
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.schedules.interleaved import Interleaved
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.end_to_end.test_fates import drawn
from tests.grid import grid
from tests.runtime.test_migrate import assert_same
from tests.zoo import CASES, Case, dropped, in_bfloat16, quick_key

MICRO = 5  # no multiple of the devices


def pipeline(
    m: Case, stages: Any, schedule: str | Schedule, micro: int = MICRO, **options: Any
) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        m.loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        stages,
        micro,
        schedule,
        planner="even",
        devices=jax.devices()[:2],
        has_aux=m.has_aux,
        has_state=m.has_state,
        **options,
    )


def started(
    m: Case, stages: Any, schedule: str | Schedule, micro: int = MICRO
) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = pipeline(m, stages, schedule, micro)
    return pipe, pipe.init(m.params, batch_of(m, micro), key_of(m), m.state)


def trained(
    m: Case, pipe: jvpipe.Pipeline, state: jvpipe.State, steps: int = 2
) -> tuple[list[float], list[Any]]:
    losses = []
    for _ in range(steps):
        state, metrics = pipe.step(state, batch_of(m, pipe.session.settings.microbatches))
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        assert (sum(pipe.ledger.live[:HOST]), pipe.ledger.live[HOST]) == (
            sum(x.nbytes for x in state.arrays),
            0,
        )
    return losses, jax.tree.leaves((pipe.params(state), pipe.model_state(state)))


def random_plan(graph: LayerGraph, schedule: str | Schedule, draw: random.Random) -> jvpipe.Plan:
    """Any cuts and any fates, for two devices."""
    rule, layers = find_schedule(schedule), len(graph.layers)
    stages = rule.stages_on(2)
    bounds = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    plan = drawn(graph, tuple(b - a for a, b in pairwise(bounds)), draw.randrange(100))
    placed = (
        replace(stage, devices=(rule.device_of(s, 2),)) for s, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=tuple(placed))


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize(
    ("name", "schedules"),
    grid(
        [
            one_hot := ("one-hot", ["zb-h1", "zb-v"]),
            ("resnet", ["interleaved"]),
            ("resnet", ["zb-v"]),
            ("deep", [Interleaved(chunks=4), "v-half"]),
            ("mlp", ["interleaved", Interleaved(chunks=2, split=True)]),
            ("three-readers", ["zb-h1", "interleaved"]),
            ("pre-norm in bfloat16", ["zb-h1"]),
            ("recurrent", ["zb-h1"]),
        ],
        one_hot,
    ),
)
def test_every_family_has_the_bits_of_1f1b_with_any_fates_and_holds_what_was_told(
    name: str, schedules: list[str | Schedule]
) -> None:
    case, _, bfloat16 = name.partition(" in ")
    known = CASES | {"deep": lambda: dropped("chain", quick_key(7), depth=9)}
    m, draw = in_bfloat16(known[case]()) if bfloat16 else known[case](), random.Random(name)
    pipe, state = started(m, 1, "1f1b")
    expected = trained(m, pipe, state)
    for schedule in schedules:
        for stages in (2, random_plan(pipe.session.graph, schedule, draw)):
            one, state = started(m, stages, schedule)
            assert_same(trained(m, one, state), expected)
            assert one.ledger.peak == [peak.bytes for peak in one.session.compiled.peaks]


@pytest.mark.parametrize("schedule", grid(["interleaved", "zb-v"], "zb-v"))
def test_what_one_family_saved_another_goes_on_with_and_layers_move_inside_a_step(
    schedule: str, tmp_path: Any
) -> None:
    m, draw = CASES["chained-keys"](), random.Random(schedule)
    pipe, state = started(m, 1, "1f1b")
    expected = trained(m, pipe, state, steps=4)
    one, state = started(m, 2, schedule)
    state, metrics = one.step(state, batch_of(m, MICRO))
    assert float(metrics["loss"]) == expected[0][0]
    one.save(tmp_path / "saved", state)
    state = one.migrate(state, random_plan(one.session.graph, schedule, draw), at=(2, 3))
    losses, arrays = trained(m, one, state, steps=3)
    assert_same(([expected[0][0], *losses], arrays), expected)
    assert [change.how for change in one.session.history] == ["inside"]
    other, _ = started(m, 2, "zb-h1")
    losses, arrays = trained(m, other, other.restore(tmp_path / "saved"), steps=3)
    assert_same(([expected[0][0], *losses], arrays), expected)


def test_an_order_that_was_found_is_part_of_the_plan_and_keeps_a_limit(tmp_path: Any) -> None:
    m = CASES["one-hot"]()
    pipe, state = started(m, 1, "1f1b")
    expected = trained(m, pipe, state)
    options = {"devices": jax.devices()[:2], "schedule": "auto", "microbatches": MICRO}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    pipe = jvpipe.Pipeline(m.loss_fn, optimizer, 2, **options)
    assert_same(trained(m, pipe, pipe.init(m.params, batch_of(m, MICRO), key_of(m))), expected)
    assert len(pipe.plan.tasks) == 2
    assert "no order is under" in pipe.explain()
    pipe.plan.save(tmp_path / "plan.json")
    again = jvpipe.Pipeline(
        m.loss_fn, optimizer, jvpipe.Plan.load(tmp_path / "plan.json"), **options
    )
    assert_same(trained(m, again, again.init(m.params, batch_of(m, MICRO), key_of(m))), expected)
    assert again.session.compiled.lists == pipe.session.compiled.lists
    small = jvpipe.Pipeline(m.loss_fn, optimizer, 2, memory_limit=1, **options)
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="bytes would do") as refused:
        small.init(m.params, batch_of(m, MICRO), key_of(m))
    # the seconds of the day decide how much the found order holds, and so whether less can be kept
    limit = max(refused.value.smallest_limit_bytes, int(0.9 * max(pipe.ledger.peak)))
    small = jvpipe.Pipeline(m.loss_fn, optimizer, 2, memory_limit=limit, **options)
    assert_same(trained(m, small, small.init(m.params, batch_of(m, MICRO), key_of(m))), expected)
    assert max(small.ledger.peak) <= limit
    with pytest.raises(
        ValueError, match="schedule 'auto' is chosen by planner 'jvpipe', not by 'even'"
    ):
        jvpipe.Pipeline(m.loss_fn, optimizer, 2, planner="even", **options)
