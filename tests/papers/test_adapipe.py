"""AdaPipe's phases, and its decisions against the best without swaps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.adapipe import adapipe
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, stage_cost
from tests.planners.small import (
    best_bottleneck_s,
    chain,
    checked_bottleneck_s,
    cuts,
    fitting,
    large,
    problems,
)


def block(kept: int = 4, seconds: float = 3.0) -> LayerCost:
    return LayerCost(
        "block", seconds / 3, 2 * seconds / 3, (Option(kept), Option(0, extra_s=seconds / 3))
    )


def two_stages_s(problem: Problem) -> float:
    """AdaPipe's T for two stages, of the best there is: its phases written out, all cuts and
    recomputation sets.
    """
    n = len(problem.costs.layers)
    best = float("inf")
    for _, cut, _ in cuts(problem):
        late = stage_cost(problem, 1, cut, n, [0] * n)
        rests = [
            min(
                (c.recompute_s for c, _ in fitting(problem, s, i, j, swap=False, apart=True)),
                default=float("inf"),
            )
            for s, (i, j) in enumerate([(0, cut), (cut, n)])
        ]
        early = stage_cost(problem, 0, 0, cut, [0] * n)
        f0, f1, c = early.forward_s, late.forward_s, late.comm_s
        b0, b1 = early.backward_s + rests[0], late.backward_s + rests[1]
        warmup, ending = f0 + max(f1 + b1 + c, f0), b0 + max(b1 + f1 + c, b0)
        steady = max(f0 + b0, f1 + b1, c, early.link_s, late.link_s)
        if problem.schedule.synchronous:
            best = min(best, warmup + ending + max(0, problem.microbatches - 2) * steady)
        else:
            best = min(best, problem.microbatches * steady)
    return best


@settings(max_examples=25, deadline=None)
@given(problems(most_layers=5).filter(lambda problem: problem.stages == 2))
def test_two_stages_equal_brute_force_over_recomputation_sets(problem: Problem) -> None:
    best_s = two_stages_s(problem)
    found_s = checked_bottleneck_s(adapipe, problem)
    if found_s is None:
        assert best_s == float("inf")
        return
    decision = adapipe(problem)
    n = len(problem.costs.layers)
    alone = replace(problem, memory_limit_bytes=None)
    early, late = (
        stage_cost(alone, s, i, j, decision.choices)
        for s, (i, j) in enumerate(pairwise(decision.bounds))
    )
    f0, f1, c = early.forward_s, late.forward_s, late.comm_s
    b0, b1 = early.backward_s + early.recompute_s, late.backward_s + late.recompute_s
    steady = max(f0 + b0, f1 + b1, c, early.link_s, late.link_s)
    took_s = problem.microbatches * steady
    if problem.schedule.synchronous:
        took_s = (
            f0
            + max(f1 + b1 + c, f0)
            + b0
            + max(b1 + f1 + c, b0)
            + max(0, problem.microbatches - 2) * steady
        )
    assert took_s == pytest.approx(best_s)
    assert len(decision.choices) == n


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems())
def test_decisions_fit_and_are_near_the_best_without_swaps(problem: Problem) -> None:
    found_s = checked_bottleneck_s(adapipe, problem)
    best_s = best_bottleneck_s(problem, swap=False, apart=True)
    if found_s is None:
        assert best_s == float("inf")
    else:
        assert best_s <= found_s * (1 + 1e-9) <= 2 * best_s


@settings(max_examples=25, deadline=None)
@given(problems())
def test_nothing_is_swapped(problem: Problem) -> None:
    try:
        decision = adapipe(problem)
    except ValueError:
        return
    assert all(stage.host_bytes == 0 for stage in evaluate_decision(problem, decision).stages)


def test_equal_stages_take_what_one_f_one_b_takes() -> None:
    """(M + S - 1) (f + b): the phases' sum is the step."""
    problem = chain([block()] * 8, 4, microbatches=8)
    decision = adapipe(problem)
    assert decision.bounds == (0, 2, 4, 6, 8)
    assert evaluate_decision(problem, decision).step_s == (8 + 4 - 1) * 6


def test_first_stages_recompute_and_get_fewer_layers() -> None:
    """Under 1F1B the first stage holds most: it must compute much again, and takes fewer layers for
    it.
    """
    problem = chain([block()] * 24, 2, memory_limit_bytes=60)
    decision = adapipe(problem)
    assert decision.bounds == (0, 11, 24)
    assert sum(decision.choices[:11]) == 4
    assert sum(decision.choices[11:]) == 0


def test_one_f_one_b_and_a_schedule_without_flush_differ() -> None:
    """With one micro-batch more than stages, warm-up and ending count; in a stream only the slowest
    stage does.
    """
    layers = [block(seconds=s) for s in (9.0, 3.0, 3.0, 6.0)]
    stream = chain(layers, 3, microbatches=4, schedule="pipedream")
    assert evaluate_decision(stream, adapipe(stream)).bottleneck_s == 9.0


def test_a_hundred_layers_on_eight_stages_fit() -> None:
    problem = large("1f1b", 0.5)
    decision = adapipe(problem)
    limit = problem.memory_limit_bytes
    assert limit is not None
    assert evaluate_decision(problem, decision).peak_bytes <= limit
