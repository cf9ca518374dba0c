"""Plans for rules of several chunks, or of split backwards, beside those of all other planners."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from experiments.planners.rivals import chain
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import Link
from jvpipe.papers.registry import PAPERS, find_planner
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.grid import grid

RULES = ("interleaved", "zb-h1", "zb-v", "v-half")


def step_s(problem: Problem, decision: Decision) -> float:
    found = evaluate_decision(problem, decision)
    limit = problem.memory_limit_bytes
    return (
        simulated_step_s(problem, found.stages)
        if limit is None or found.limit_bytes <= limit
        else float("inf")
    )


@pytest.mark.parametrize(
    ("slow", "share", "rule"),
    grid(
        ((*case, rule) for case in ((True, None), (False, 0.7)) for rule in RULES),
        (True, None, "zb-v"),
        (True, None, "interleaved"),
        (False, 0.7, "zb-h1"),
        (False, 0.7, "v-half"),
    ),
)
def test_no_other_planner_is_faster(slow: bool, share: float | None, rule: str) -> None:
    costs, link = chain(9, slow)
    schedule = find_schedule(rule)
    problem = Problem(
        costs, schedule.stages_on(2), schedule, 4, host=Link(12e9), peer=link, peer_uses_host=slow
    )
    full = evaluate_decision(problem, find_planner("even").decide(problem)).peak_bytes
    problem = replace(problem, memory_limit_bytes=share and int(share * full))
    ours_s = step_s(problem, under_rule(problem))
    for planner in PAPERS:
        try:
            theirs = find_planner(planner.name).decide(problem)
        except Infeasible:
            continue
        assert ours_s <= step_s(problem, theirs) * (1 + 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_few_layers_are_cut_best(rule: str) -> None:
    """All cuts of nine layers, where an edge in the middle is dear: the simulator finds nothing
    faster.
    """
    seconds, schedule = (3.0, 1.0, 1.0, 4.0, 1.0, 2.0, 1.0, 1.0, 3.0), find_schedule(rule)
    layers = tuple(
        LayerCost("layer", s, 2 * s, (Option(8),), split=SplitCost(s, s, 4, 4)) for s in seconds
    )
    edges = tuple(Edge(i, (i + 1,), 40 if i == 4 else 1) for i in range(8))
    problem = Problem(Costs(layers, edges), schedule.stages_on(2), schedule, 4, peer=Link(20.0))
    inner = combinations(range(1, 9), problem.stages - 1)
    every = (Decision.keeping_all((0, *bounds, 9)) for bounds in inner)
    best_s = min(step_s(problem, one) for one in every)
    found = under_rule(problem)
    assert all(a < b for a, b in pairwise(found.bounds))
    assert step_s(problem, found) <= 1.03 * best_s
