"""Tiers of working bytes, against every segment's own layers."""

import itertools

import numpy as np
import pytest

from jvpipe.planners.joint.choice_arrays import Choices
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.joint.working_tiers import range_max, spread_max, tiers
from jvpipe.planners.model.problem import RECOMPUTE_CHAIN
from jvpipe.planners.model.stage_bytes import layers_bytes
from tests.planners.joint.enumeration import choices, tiny


def test_the_largest_of_any_range() -> None:
    values = np.random.default_rng(0).uniform(0, 9, 13)
    starts, ends = np.triu_indices(13)
    largest = range_max(values, starts, ends + 1)
    assert largest.tolist() == [values[i : j + 1].max() for i, j in zip(starts, ends, strict=True)]


def test_the_largest_of_each_segment() -> None:
    pricing = pricing_of(tiny(0))
    cuts = np.arange(5)
    grid = spread_max(np.array([3.0, 1.0, 4.0, 1.0]), pricing.segments.block(0, cuts, cuts))
    assert grid[0].tolist() == [0, 3, 3, 4, 4]
    assert grid[3].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_tiers_lie_side_by_side_and_hold_all_that_choices_work_with(seed: int) -> None:
    problem = tiny(seed)
    layers, every = problem.costs.layers, tiers(Choices.of(problem.costs), np.inf, 10)
    assert all(a.high < b.low <= b.high for a, b in itertools.pairwise(every))
    for some in choices(problem, 0, 4):
        most = max(x.working for x in layers_bytes(layers, some))
        assert any(tier.low <= most <= tier.high for tier in every)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_charged_no_more_than_the_input_that_it_keeps(seed: int) -> None:
    problem = tiny(seed)
    layers = problem.costs.layers
    for tier in tiers(Choices.of(problem.costs), np.inf, 10):
        for i in range(4):
            for j in range(i + 2, 5):
                run = [-1, *[RECOMPUTE_CHAIN] * (j - i - 1)]
                if max(x.working for x in layers_bytes(layers[i:j], run)) <= tier.high:
                    assert tier.in_run_bytes[i:j].sum() <= layers[i].input_bytes + 1e-9
