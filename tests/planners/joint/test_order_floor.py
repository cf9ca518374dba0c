"""Whether some order keeps a limit, against a search through all that devices can do."""

import random
from dataclasses import replace

import pytest

from jvpipe.papers.asking import ask
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.device_orders import orders
from jvpipe.planners.joint.order_floor import order_floors
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule
from tests.grid import grid
from tests.planners.joint.exact_orders import some_order_keeps
from tests.planners.joint.orders import problem_of

PROBLEMS = 10
"""Problems that are drawn from a seed."""


def drawn(seed: int) -> Problem:
    """At most 3 devices, 6 layers and 6 micro-batches; where devices may have several stages, 3
    micro-batches.
    """
    draw = random.Random(seed)
    devices = draw.randint(1, 3)
    layers = draw.randint(max(2, devices), 6)
    most = 6 if devices == 1 or layers < 2 * devices else 3
    return problem_of(layers, devices, draw.randint(1, most), seed)


def limited(problem: Problem, limit: int) -> Problem:
    return replace(problem, memory_limit_bytes=limit)


def smallest(problem: Problem, rule: str) -> int:
    """The smallest limit that a rule's planner names."""
    schedule = find_schedule(rule)
    other = replace(
        problem, schedule=schedule, stages=schedule.stages_on(problem.devices), memory_limit_bytes=1
    )
    with pytest.raises(Infeasible) as refused:
        find_planner("jvpipe").decide(other)
    return refused.value.smallest_limit_bytes


def named(problem: Problem) -> int | None:
    """The limit that would do, where there is no plan."""
    try:
        find_order(problem)
    except Infeasible as refused:
        return refused.smallest_limit_bytes
    return None


@pytest.mark.parametrize("first", grid(range(0, 200, PROBLEMS), 0))
def test_there_is_a_plan_just_where_some_order_keeps_the_limit(first: int) -> None:
    for seed in range(first, first + PROBLEMS):
        problem = drawn(seed)
        least = named(limited(problem, 1))
        assert least is not None
        tight = random.Random(seed).randint(least - 3, max(least, smallest(problem, "1f1b")) + 1)
        would_do = named(limited(problem, tight))
        assert (would_do is None) == some_order_keeps(problem, tight), seed
        if would_do is not None:
            assert some_order_keeps(problem, would_do), seed
            assert not some_order_keeps(problem, would_do - 1), seed
            assert named(limited(problem, would_do)) is None, seed


def test_no_rule_does_with_a_smaller_limit_than_the_one_that_is_named() -> None:
    problem = problem_of(7, 2, 3)
    least = named(limited(problem, 1))
    assert least is not None
    rules = ["1f1b", "zb-h1", "gpipe", "interleaved", "zb-v", "v-half"]
    assert least <= min(smallest(problem, rule) for rule in rules)


def test_of_unlike_devices_the_limit_that_is_named_does_in_some_order() -> None:
    roomy = problem_of(5, 3, 2).told_apart([()] * 3, [60, 40, 50])
    tight = replace(roomy, schedule=AUTO, memory_limit_bytes=21)
    with pytest.raises(Infeasible) as refused:
        ask("jvpipe", tight)
    enough = refused.value.smallest_limit_bytes
    planned = ask("jvpipe", limited(tight, enough))
    assert evaluate_decision(planned.problem, planned.decision).limit_bytes <= enough
    every = [one for order in orders(roomy) for one in order_floors(order, [ONE_F_ONE_B])]
    assert enough <= min(one.limit_bytes for one in every)


@pytest.mark.parametrize("placed", [Interleaved(), VSchedule(), Interleaved(chunks=4)])
def test_of_many_cuts_an_emptier_plan_is_found_than_by_chance(placed: Schedule) -> None:
    problem, draw = problem_of(24, 4, 2), random.Random(0)
    (least,) = order_floors(problem, [placed])
    stages = least.schedule.stages_on(4)
    alone = replace(problem, stages=stages, schedule=least.schedule)
    assert least.limit_bytes == evaluate_decision(alone, least.decision).limit_bytes
    for _ in range(50):
        bounds = (0, *sorted(draw.sample(range(1, 24), stages - 1)), 24)
        assert (
            least.limit_bytes
            <= evaluate_decision(alone, Decision(bounds, (RECOMPUTE,) * 24)).limit_bytes
        )
