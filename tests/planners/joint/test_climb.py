"""The climb by neighbors, against all plans of few layers."""

from dataclasses import replace

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Group, Problem
from jvpipe.planners.model.stage_cost import check, evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import tiny
from tests.planners.small import SCHEDULES, chain, limited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_that_keep_all_are_cut_where_the_simulator_is_fastest(schedule: str) -> None:
    problem = limited(tiny(2, schedule, layers=7), None)
    every = [Decision.keeping_all((0, cut, 7)) for cut in range(1, 7)]
    steps = [
        simulated_step_s(problem, evaluate_decision(problem, decision).stages) for decision in every
    ]
    best = Climb(problem, (), 10_000).top([every[0]])
    assert best is not None
    assert simulated_step_s(problem, evaluate_decision(problem, best).stages) == pytest.approx(
        min(steps)
    )


def test_it_stops_when_its_tasks_are_spent_and_never_gets_worse() -> None:
    problem = tiny(3)
    begin, ranks = solve(problem, pricing_of(problem)).decision(), []
    for tasks in (1, 200, 10_000):
        climb = Climb(problem, [DeviceFates.of(problem, swaps=True)], tasks)
        best = climb.top([begin])
        assert best is not None
        ranks.append(climb.rank(best))
    assert ranks == sorted(ranks, reverse=True)
    assert np.isfinite(ranks[0][0])


def test_a_plan_over_a_limit_ranks_last_and_is_no_answer() -> None:
    problem = replace(tiny(3), memory_limit_bytes=1)
    climb, plan = Climb(problem, (), 10), Decision.keeping_all((0, 2, 4))
    assert climb.rank(plan)[0] == np.inf
    assert climb.top([plan]) is None
    assert climb.tasks == 10


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_replicas_whose_layers_have_fewer_options_are_planned(schedule: str) -> None:
    """Options are found for each size of local batch, so their number depends on it."""
    options = Option(100), Option(30, extra_s=0.4, extra_bytes=100), Option(0, 0, 0.9, 100)
    layers = tuple(LayerCost("block", 1.0, 2.0, options[: 2 + at % 2], 5) for at in range(8))
    halves = Costs(layers, tuple(Edge(at, (at + 1,), 1) for at in range(7)))
    whole = replace(halves, layers=tuple(replace(layer, options=options) for layer in layers))
    groups = Group((0, 1), costs=halves), Group((2,), costs=whole)
    chunks = find_schedule(schedule).chunks
    for every in (groups, groups[::-1]):
        problem = Problem(whole, 2 * chunks, find_schedule(schedule), 4, groups=every)
        even = evaluate_decision(problem, find_planner("even").decide(problem)).peak_bytes
        limited = replace(problem, memory_limit_bytes=int(0.7 * even))
        check(limited, under_rule(limited))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_is_computed_again_is_made_a_run_where_cotangents_are_awaited(schedule: str) -> None:
    """Of two layers the first then runs again before the cotangents are there: of three stages
    before the last one.
    """
    options = Option(100), Option(0, extra_s=1.0, extra_bytes=100)
    layers = [LayerCost("block", 1.0, 2.0, options, input_bytes=1)] * 8
    problem = chain(layers, 4, 4, schedule, memory_limit_bytes=260)
    found = jvpipe(problem)
    assert found.choices[:4] == (RECOMPUTE, RECOMPUTE_CHAIN) * 2
    apart = replace(found, choices=tuple(RECOMPUTE if c < 0 else c for c in found.choices))
    run_s, apart_s = (
        simulated_step_s(problem, evaluate_decision(problem, one).stages) for one in (found, apart)
    )
    assert run_s == apart_s - 3
