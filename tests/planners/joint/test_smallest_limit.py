"""The plan of fewest bytes, against all plans."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from jvpipe.planners.joint import min_bytes
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.smallest_limit import (
    Peaks,
    longer_bytes,
    min_bytes_plan,
    nothing_fits,
)
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, stage_cost
from tests.planners.joint.enumeration import choices, every_decision, tiny
from tests.planners.small import limited, problems


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_has_an_emptier_fullest_stage(seed: int) -> None:
    problem = tiny(seed, ("1f1b", "gpipe", "2bw")[seed], layers=3)
    pricing = pricing_of(problem)
    plan = min_bytes_plan(pricing)
    least = min(
        evaluate_decision(problem, decision).peak_bytes for decision in every_decision(problem)
    )
    assert plan.bytes == least == evaluate_decision(problem, plan.decision).peak_bytes


def test_the_error_names_the_smallest_limit() -> None:
    pricing = pricing_of(limited(tiny(0), 1))
    decision = min_bytes_plan(pricing).decision
    smallest = nothing_fits(pricing).smallest_limit_bytes
    assert evaluate_decision(tiny(0), decision).peak_bytes == smallest


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=4, tight=False))
def test_a_longer_segment_takes_no_less_than_is_claimed(problem: Problem) -> None:
    pricing, n = pricing_of(problem), len(problem.costs.layers)
    for s in range(problem.stages):
        block = pricing.segments.block(s, np.arange(n), np.arange(1, n + 1))
        least = {
            (i, j): min(
                stage_cost(problem, s, i, j, some).peak_bytes for some in choices(problem, i, j)
            )
            for i in range(n)
            for j in range(i + 1, n + 1)
        }
        for (i, j), peak in least.items():
            held = peak - float(block.fixed_bytes[i, j - 1])
            claimed = longer_bytes(pricing, block, i, j - 1, held)
            assert all(
                claimed[a, b - j] <= least[a, b] for a in range(i + 1) for b in range(j, n + 1)
            )
            assert claimed[i, 0] == peak


@pytest.mark.parametrize("seed", [2, 4])
def test_what_a_search_of_few_states_misses_raises_no_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = tiny(seed, layers=10)
    cuts = [np.array(places) for places in ((0, 1, 2), (7, 8, 9), (10,))]
    every, few = Peaks(pricing_of(problem), cuts), Peaks(pricing_of(problem), cuts)
    cells = [(a, b) for a in range(3) for b in range(3)]
    least = {cell: every.settle(0, *cell, np.inf) for cell in cells}
    monkeypatch.setattr(min_bytes, "FATE", replace(FATE, few_states=1, many_states=1))
    assert few.settle(0, 2, 0, np.inf) > least.pop((2, 0))
    assert all(few.bytes[0][cell] <= peak for cell, peak in least.items())
