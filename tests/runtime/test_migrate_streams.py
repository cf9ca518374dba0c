"""Layers move while a stream flows: its ledger replays to the bit, no weights are staler than the
rule of the stage.
"""

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.lowering.stream.parts import versions
from jvpipe.schedules import find_schedule
from tests.end_to_end.test_exactness import key_of
from tests.end_to_end.test_streams import ADAMW, MICRO, SCHEDULES, assert_same, batches_of
from tests.grid import grid
from tests.runtime.test_migrate import random_plan
from tests.zoo import CASES, Case

STEPS = 5


def pipeline(m: Case, stages: Any, schedule: str, **options: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        m.loss_fn,
        ADAMW,
        stages,
        MICRO,
        SCHEDULES[schedule],
        planner="even",
        devices=jax.devices()[:4],
        has_aux=m.has_aux,
        has_state=m.has_state,
        **options,
    )


def run(
    m: Case,
    schedule: str,
    stages: Any,
    moves: dict[tuple[int, int], Any],
    steps: int = STEPS,
    **options: Any,
) -> tuple[jvpipe.Pipeline, jvpipe.State, list[float]]:
    """A stream whose plan changes at these (step, micro-batch); a plan may be a function of the
    pipeline.
    """
    pipe, batches = pipeline(m, stages, schedule, **options), batches_of(m, steps)
    state = pipe.init(m.params, batches[0], key_of(m), m.state)
    losses = []
    stream = iter(batches)
    while len(losses) < steps:
        for at, plan in moves.items():
            if at[0] == len(losses):
                state = pipe.migrate(
                    state, plan if isinstance(plan, jvpipe.Plan) else plan(pipe), at
                )
        for found in pipe.run(state, stream, 1):
            state, metrics = found
            losses.append(float(metrics["loss"]))
    return pipe, state, losses


@pytest.mark.parametrize(
    ("case", "schedule"),
    grid(
        [*(("one-hot", name) for name in SCHEDULES), ("resnet", "pipemare")],
        ("one-hot", "pipedream"),
    ),
)
def test_the_replay_gives_the_same_bits(case: str, schedule: str) -> None:
    m, draw = CASES[case](), random.Random(f"{case} {schedule}")
    moves = {
        (step, draw.randrange(MICRO)): lambda pipe: random_plan(pipe, draw)
        for step in range(1, STEPS - 1)
    }
    pipe, state, losses = run(m, schedule, 3, moves)
    again, each = jvpipe.replay(
        pipe.ledger, pipe, m.params, batches_of(m, STEPS), key_of(m), m.state
    )
    assert_same(pipe.params(state), again)
    assert len(each) == STEPS * MICRO
    assert all(np.isfinite(losses))
    assert len(pipe.session.history) == len(moves)
    assert all(change.how == "inside" for change in pipe.session.history)
    lawful(pipe, schedule)
    state = jax.block_until_ready(pipe.drain(state))
    assert sum(pipe.ledger.live) == sum(x.nbytes for x in state.arrays), "something leaked"
    assert pipe.ledger.live[HOST] == 0


def lawful(pipe: jvpipe.Pipeline, name: str) -> None:
    """No forward reads older weights than its stage's rule; S micro-batches after a change, none
    reads newer ones.
    """
    schedule = find_schedule(SCHEDULES[name])
    moments = [(c.step * MICRO + c.microbatch, c.new) for c in pipe.session.history]
    plans = [(0, pipe.session.history[0].old), *moments]
    tables = {
        S: versions(schedule, schedule.with_updates(S, MICRO, 2 * STEPS * MICRO), MICRO)
        for S in range(1, 5)
    }
    for (layer, m), reads in pipe.ledger.versions.table().items():
        start, plan = [leg for leg in plans if leg[0] <= m][-1]
        before = plans[max(plans.index((start, plan)) - 1, 0)][1]
        rule = tables[len(plan.stages)].forward[plan.stage_of(layer)][m]
        assert reads.forward >= rule
        settled = not schedule.predicts and m >= start + max(len(plan.stages), len(before.stages))
        assert reads.forward == rule or not (settled or start == 0)
        assert reads.backward is None or reads.backward >= reads.forward


@pytest.mark.thorough
def test_2bw_and_vertical_sync_do_not_notice() -> None:
    """Their versions do not depend on the stage, if there are as many as before."""
    m = CASES["one-hot"]()
    cuts = [[1, 2, 2], [2, 2, 1], [3, 1, 1]]
    for schedule in ("2bw", "vertical"):
        moves = {(step, 3 - step): jvpipe.Plan.from_cuts(cuts[step % 3]) for step in (1, 2)}
        pipe, state, losses = run(m, schedule, jvpipe.Plan.from_cuts(cuts[0]), moves, 4)
        plain, ended, expected = run(m, schedule, jvpipe.Plan.from_cuts(cuts[0]), {}, 4)
        assert losses == expected
        assert_same(pipe.params(pipe.drain(state)), plain.params(plain.drain(ended)))


def test_a_run_saved_on_the_way_goes_on_to_the_bit(tmp_path: Path) -> None:
    m, there = CASES["one-hot"](), jvpipe.Plan.from_cuts([1, 1, 3])
    moves: dict[tuple[int, int], Any] = {(1, 3): there}
    whole, ended, _ = run(m, "pipedream", 3, moves, 4)
    pipe, state, _ = run(m, "pipedream", 3, moves, 2)
    assert pipe.session.compiled.previous is not None, "the earlier plan is still in flight"
    pipe.save(tmp_path / "state", state)
    plan = jvpipe.checkpoint_plan(tmp_path / "state")
    assert plan == pipe.plan == there.with_schedule("pipedream")
    other = pipeline(m, plan, "pipedream")
    restored = other.restore(tmp_path / "state")
    for found in other.run(restored, batches_of(m, 4)[2:]):
        restored = found[0]
    assert_same(other.params(other.drain(restored)), whole.params(whole.drain(ended)))


@pytest.mark.thorough
def test_a_run_that_broke_on_the_way_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    m, here, there = (
        CASES["mlp"](),
        jvpipe.Plan.from_cuts([1, 2, 2]),
        jvpipe.Plan.from_cuts([2, 2, 1]),
    )
    pipe, state, _ = run(m, "pipedream", here, {}, 1)
    pipe.save(tmp_path / "plain", pipe.drain(state))
    pipe, state, _ = run(m, "pipedream", here, {(1, 1): there}, 2)
    assert pipe.session.compiled.previous is not None, "the earlier plan is still in flight"
    found = []
    for one in (pipe, pipeline(m, there, "pipedream")):
        state = one.restore(tmp_path / "plain")
        for state, _ in one.run(state, batches_of(m, 3)[1:]):  # noqa: B007, B020
            pass
        state = jax.block_until_ready(one.drain(state))
        assert sum(one.ledger.live) == sum(x.nbytes for x in state.arrays), (
            "nothing of the broken run is counted"
        )
        found.append(one.params(state))
    assert_same(*found)


@pytest.mark.parametrize("schedule", grid(["pipedream", "2bw"], "2bw"))
def test_a_limit_is_kept_on_the_way(schedule: str) -> None:
    """With room for it the move is made in the flow, without it after a drain."""
    m, here = CASES["unused"](), jvpipe.Plan.from_cuts([2, 2])
    there = jvpipe.Plan.from_cuts([2, 2], devices=[1, 0])
    plain, *_ = run(m, schedule, here, {}, 1)
    least = max(peak.bytes for peak in plain.session.compiled.peaks)
    ways = []
    for limit in (least, 2 * least):
        pipe, _, _ = run(m, schedule, here, {(1, 2): there}, 3, memory_limit=limit)
        assert max(pipe.ledger.peak[:HOST]) <= limit
        ways += [change.how for change in pipe.session.history]
    assert ways in (["between", "inside"], ["by host", "inside"])
