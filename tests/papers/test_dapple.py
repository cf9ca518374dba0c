"""DAPPLE's planner: its latency as the paper has it, and plans near the least."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.papers.dapple import Phases, dapple, latency_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import check, crossing_bytes, evaluate_decision
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import OneFOneB
from tests.planners.small import cuts, limited, problems


def latency(stages: list[tuple[float, float, float]], m: int) -> float:
    """Equations 1 to 3, letter by letter, of stages with F, B and AR; but for B_Q, which counts for
    Q itself.
    """
    steady = [(m - 1) * (f + b) for f, b, _ in stages]
    q = len(steady) - 1
    for s in reversed(range(len(steady))):
        if steady[s] > steady[q] + sum(f + b for f, b, _ in stages[s + 1 : q]):
            q = s
    ending = []
    for s, (_, _, reduce_s) in enumerate(stages):
        later = -sum(b for _, b, _ in stages[q : s + 1])
        ending.append(reduce_s + (later if s > q else sum(b for _, b, _ in stages[s : q + 1])))
    return sum(f for f, _, _ in stages[: q + 1]) + steady[q] + max(ending)


def plan_latency(problem: Problem, bounds: tuple[int, ...]) -> float:
    """The latency of cuts, transfers as stages between stages."""
    stages = []
    for i, j in pairwise(bounds):
        if i:
            there, back, _ = crossing_bytes(problem, i, j)
            stages.append((problem.peer.seconds(there), problem.peer.seconds(back), 0.0))
        layers = problem.costs.layers[i:j]
        stages.append((sum(x.forward_s for x in layers), sum(x.backward_s for x in layers), 0.0))
    return latency(stages, problem.microbatches)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=9), st.integers(1, 8))
def test_the_latency_is_the_papers(stages: list[tuple[int, int, int]], m: int) -> None:
    every = [(float(f), float(b), float(r)) for f, b, r in stages]
    assert latency_s([Phases(*each) for each in every], m) == pytest.approx(latency(every, m))


def of(*work_s: float) -> float:
    """L of stages and transfers of these seconds, 4 micro-batches."""
    both = latency_s([Phases(s / 3, 2 * s / 3) for s in work_s], 4)
    assert isinstance(both, float)
    return both


def test_equal_stages_take_the_time_of_the_drawing() -> None:
    assert of(3.0, 0.0, 3.0, 0.0, 3.0) == pytest.approx((4 + 3 - 1) * 3.0)


def test_the_pivot_moves_to_the_stage_with_the_fewest_bubbles() -> None:
    assert of(9.0, 1.0, 2.0) == pytest.approx(9.0 + 3 * 9.0)  # the first
    assert of(2.0, 1.0, 9.0, 1.0, 2.0) == pytest.approx((2.0 + 1.0 + 9.0) + 3 * 9.0)  # the middle
    assert of(2.0, 9.0, 2.0) == pytest.approx((2.0 + 9.0) + 3 * 9.0)  # a transfer


def test_one_f_one_b_runs_the_papers_policies() -> None:
    for stages, most in ((1, 9), (3, 9), (5, 4)):
        a = tuple(min(stages - i, most) for i in range(stages))
        b = tuple(min(2 * (stages - i) - 1, most) for i in range(stages))
        for policy in (a, b):
            assert OneFOneB(most=policy).in_flight(stages, 16) == policy


@settings(max_examples=50, deadline=None)
@given(problems(most_layers=8))
def test_plans_fit_and_are_near_the_least_latency(problem: Problem) -> None:
    limit = problem.memory_limit_bytes
    assert limit is not None
    every = {
        bounds: evaluate_decision(problem, Decision.keeping_all(bounds)).peak_bytes
        for bounds in cuts(problem)
    }
    fitting = [plan_latency(problem, bounds) for bounds, peak in every.items() if peak <= limit]
    if not fitting:
        with pytest.raises(Infeasible) as caught:
            dapple(problem)
        assert caught.value.smallest_limit_bytes == min(every.values())
        return
    decision = dapple(problem)
    check(problem, decision)
    assert every[decision.bounds] <= limit
    # The program keeps one plan per (j, m). Of 300 random chains of 3 to 5 stages: 1.006 on
    # average, 1.36 at worst.
    factor = 1.0 if problem.stages <= 2 else 1.5
    assert plan_latency(problem, decision.bounds) <= min(fitting) * factor * (1 + 1e-9)


def test_a_little_uneven_is_better_with_few_micro_batches() -> None:
    layers = tuple(LayerCost("layer", 1.0, 2.0, (Option(8),)) for _ in range(5))
    problem = Problem(Costs(layers), 2, find_schedule("1f1b"), 2)
    assert dapple(problem).bounds == (0, 3, 5)  # the pivot is the first stage: 9 + 9, not 15 + 9
    totals = list(accumulate(layer.forward_s + layer.backward_s for layer in layers))
    assert plan_latency(problem, (0, 3, 5)) == totals[2] + 9.0


def test_a_limit_takes_layers_from_the_stage_that_holds_most() -> None:
    layers = (LayerCost("layer", 1.0, 1.0, (Option(10),)),) * 6
    problem = Problem(Costs(layers), 3, find_schedule("1f1b"), 8)
    assert evaluate_decision(problem, dapple(problem)).peak_bytes == 60
    assert evaluate_decision(problem, dapple(limited(problem, 40))).peak_bytes <= 40
    with pytest.raises(Infeasible) as caught:
        dapple(limited(problem, 39))
    assert caught.value.smallest_limit_bytes == 40
