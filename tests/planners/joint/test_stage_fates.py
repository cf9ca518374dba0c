"""The fastest choices of a segment, against all of them."""

import random

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.segment_table import Table
from jvpipe.planners.joint.stage_fates import FateQuery, FateSearch
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import EFFORT, every_cost, settle, tiny


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_no_choices_that_fit_are_faster(seed: int, share: float) -> None:
    problem = tiny(seed, share=share)
    pricing, limit = pricing_of(problem), problem.memory_limit_bytes or 0
    for s, i, j in ((0, 0, 3), (1, 1, 4), (1, 2, 4)):
        block = pricing.segments.block(s, np.array([i]), np.array([j]))
        room = pricing.limit_bytes - float(block.fixed_bytes[0, 0])
        lot = Lot.of_stage(problem.in_flight[s], (s, i, j))
        query = FateQuery(lot, float(block.compute_s[0, 0]), float(block.traffic_s[0, 0]), room)
        found_s = FateSearch(pricing, query, (1.0, 0.0)).least_seconds(4000).seconds
        fits = [cost.seconds for cost in every_cost(problem, s, i, j) if cost.peak_bytes <= limit]
        assert found_s == pytest.approx(min(fits, default=np.inf))


@pytest.mark.parametrize("compute_s", [0.54, 0.545, 0.55])
def test_estimates_that_round_to_nothing_are_not_scaled(compute_s: float) -> None:
    # A choice of 1 s counts exp(-1 / (0.01 compute_s / 4)) in estimates, about 1e-320.
    keep, again = Option(8), Option(0, extra_s=1.0, extra_bytes=8)
    costs = Costs((LayerCost("block", 1.0, 2.0, (keep, again)),) * 4)
    problem = Problem(costs, 1, find_schedule("1f1b"), microbatches=1, memory_limit_bytes=24)
    lot = Lot.of_stage(problem.in_flight[0], (0, 0, 4))
    query = FateQuery(lot, compute_s, 0.0, 24.0)
    search = FateSearch(pricing_of(problem), query, (1.0, 1e-6))
    assert all(np.isfinite(estimate).all() for estimate in search.expected)


def test_what_a_stage_may_swap_is_kept() -> None:
    problem = tiny(1, share=0.3)
    pricing = pricing_of(problem)
    for most in (0.0, 8.0):
        table = Table(pricing, [np.array([0]), np.array([2]), np.array([4])], EFFORT, (most, most))
        for cell in ((0, 0, 2), (1, 2, 4)):
            settle(table, cell)
            if np.isfinite(table.seconds(cell)):
                swapped = sum(
                    pricing.choices.swapped_bytes[cell[1] + at, choice]
                    for at, choice in enumerate(table.fates.get(cell, (0, 0)))
                )
                assert swapped <= most


def test_choices_of_few_bytes_that_break_a_limit_prove_nothing() -> None:
    draw = random.Random(89)
    layers = []
    for _ in range(14):
        size = draw.randint(20, 200)
        part = Option(size // 3, extra_s=draw.random(), extra_bytes=draw.randint(0, 60))
        options = (Option(size), Option(0, swapped_bytes=size), part)
        layers.append(LayerCost("block", 1.0, 2.0, options, input_bytes=draw.randint(5, 150)))
    limit, swapped = 400 + draw.randint(0, 900), float(draw.randint(100, 900))
    schedule, host = find_schedule("1f1b"), Link(200.0)
    problem = Problem(Costs(tuple(layers)), 1, schedule, 4, host=host, memory_limit_bytes=limit)
    query = FateQuery(Lot.of_stage(3, (0, 0, 14)), 42.0, 0.0, float(limit), swapped)
    search = FateSearch(pricing_of(problem), query)
    assert search.least_seconds(2000).choices  # there are choices that keep both limits
    few = search.emptiest()
    assert not few.choices
    assert not few.proven


def test_the_bound_of_a_search_for_faster_choices_is_not_above_the_fastest_that_fit() -> None:
    problem = tiny(0, share=0.6)
    pricing = pricing_of(problem)
    block = pricing.segments.block(0, np.array([0]), np.array([3]))
    room = pricing.limit_bytes - float(block.fixed_bytes[0, 0])
    lot = Lot.of_stage(problem.in_flight[0], (0, 0, 3))
    query = FateQuery(lot, float(block.compute_s[0, 0]), float(block.traffic_s[0, 0]), room)
    search = FateSearch(pricing, query)
    fastest_s = search.least_seconds(4000).seconds
    faster = search.least_seconds(4000, below_s=fastest_s)
    assert not faster.choices
    assert faster.bound_s <= fastest_s < np.inf
