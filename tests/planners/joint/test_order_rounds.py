"""Orders in rounds: whole, within the room there is, and as short as what zero bubble's own
heuristics find.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.joint.order_rounds import RULES, Rounds
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.schedules.interleaved import ZBH1
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


def drawn(seed: int, *, every_splits: bool = True) -> Problem:
    """A chain with a layer for each device."""
    draw = np.random.default_rng(seed)
    devices, microbatches = int(draw.integers(2, 7)), int(draw.integers(1, 13))
    layers = []
    for _ in range(devices):
        f, i, w = (float(x) for x in draw.uniform(1, 3, 3))
        split = (
            SplitCost(i, w, int(draw.integers(1, 8)))
            if every_splits or draw.random() < 0.5
            else None
        )
        layers.append(LayerCost("block", f, i + w, (Option(10),), split=split))
    edges = tuple(Edge(k, (k + 1,), int(draw.integers(0, 3))) for k in range(devices - 1))
    return Problem(
        Costs(tuple(layers), edges),
        devices,
        ZBH1(),
        microbatches,
        peer=Link(5.0),
        peer_uses_host=False,
    )


def loads_of(problem: Problem) -> Loads:
    return Loads.of(problem, Decision.keeping_all(range(problem.devices + 1)))


@pytest.mark.parametrize("seed", range(12))
def test_every_rule_does_each_task_once_in_an_order_that_runs(seed: int) -> None:
    problem = drawn(seed, every_splits=seed % 2 == 0)
    loads = loads_of(problem)
    for rule in RULES:
        order = Rounds(loads, loads.room_bytes, rule).order
        assert order is not None, "there is room for all"
        for s, steps in enumerate(order):
            halves = (Kind.I, Kind.W) if loads.splits[s] else (Kind.B,)
            tasks = [
                Task(s, kind, m) for kind in (Kind.F, *halves) for m in range(problem.microbatches)
            ]
            assert Counter(steps) == Counter(tasks)
        assert np.isfinite(Course(loads, order).step_s)


@pytest.mark.parametrize("seed", range(6))
def test_the_clock_of_rounds_is_that_of_courses(seed: int) -> None:
    loads = loads_of(replace(drawn(seed), peer=INFINITE))
    for rule in RULES:
        rounds = Rounds(loads, [4 * kept for kept in loads.kept_bytes], rule)
        if rounds.order is not None:
            step_s = max(device.end_s for device in rounds._devices)
            assert step_s == pytest.approx(Course(loads, rounds.order).step_s)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_holds_more_than_there_is_room_for(seed: int) -> None:
    problem = drawn(seed)
    loads, found = loads_of(problem), 0
    for units in (1, 2, 3.5, 6):
        rooms = [units * kept for kept in loads.kept_bytes]
        for rule in RULES:
            order = Rounds(loads, rooms, rule).order
            if order is not None:
                found += 1
                assert all(
                    loads.peak_bytes(x) <= room for x, room in zip(order, rooms, strict=True)
                )
    assert found >= 16, "of one micro-batch there is room with any rule"


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_a_device_with_room_for_all_waits_for_one_with_room_for_few(microbatches: int) -> None:
    problem = replace(drawn(1), microbatches=microbatches, peer=INFINITE)
    loads = loads_of(problem)
    rooms = [kept * (100 if d else 1) for d, kept in enumerate(loads.kept_bytes)]
    for rule in RULES:
        rounds = Rounds(loads, rooms, rule)
        assert rounds.order is not None
        step_s = max(device.end_s for device in rounds._devices)
        assert step_s == pytest.approx(Course(loads, rounds.order).step_s)


def published(limit: int | None) -> Problem:
    """Eight devices of a block each: F, I and W of 10 s, and a send of 8 s."""
    first = LayerCost("embed", 0.0, 0.0, (Option(0),), split=SplitCost(0.0, 0.0))
    block = LayerCost("block", 10.0, 20.0, (Option(1000),), split=SplitCost(10.0, 10.0, 500))
    costs = Costs((first, *[block] * 8), tuple(Edge(k, (k + 1,), k and 1) for k in range(8)))
    return Problem(costs, 8, ONE_F_ONE_B, 24, limit, peer=Link(1 / 8), peer_uses_host=False)


def test_a_looser_limit_is_never_slower(thorough: bool) -> None:
    between = (12_000, 25_000, 100_000) if thorough else ()
    limits = (*sorted((9_000, 17_000, *between)), None)
    seconds = [find_order(published(limit)).step_s for limit in limits]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 846.0, "which no order is below"


def test_a_setting_of_zero_bubble_takes_no_longer_than_its_own_heuristic() -> None:
    """The 1.5B row of 24 micro-batches; experiments/schedules/published.py has them all."""
    f, i, w, send_s = 0.018522, 0.018086, 0.009337, 0.000601
    heuristic_s = 1.2366
    block = LayerCost("block", f, i + w, (Option(201_216),), split=SplitCost(i, w, 73_728))
    costs = replace(published(None).costs, layers=(published(None).costs.layers[0], *[block] * 8))
    problem = replace(published(None), costs=costs, peer=Link(1 / send_s))
    assert find_order(problem).step_s < 1.0001 * heuristic_s
