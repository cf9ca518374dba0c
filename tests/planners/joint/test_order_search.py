"""`schedule="auto"`: no slower than any rule, under the limit, beside a bound, and always the
same.
"""

from dataclasses import replace
from itertools import product

import pytest

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.papers.asking import ask
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.joint.ordered_plan import OrderedPlan
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import SCHEDULES, find_schedule
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.planned import lists_of
from tests.grid import grid
from tests.planners.joint.orders import problem_of

RULES = [name for name, schedule in SCHEDULES.items() if schedule.synchronous]


def checked(problem: Problem, found: OrderedPlan) -> None:
    """Asserts that a plan takes what it says, and fits."""
    costs = replace(
        problem.costs,
        layers=tuple(
            replace(x, split=None) if i in found.whole else x
            for i, x in enumerate(problem.costs.layers)
        ),
    )
    stages = found.schedule.stages_on(problem.devices)
    planned = replace(problem, costs=costs, schedule=found.schedule, stages=stages)
    evaluation = evaluate_decision(planned, found.decision)
    assert simulated_step_s(planned, evaluation.stages) == found.step_s
    assert found.bound_s <= found.step_s + 1e-9
    assert (
        lower_bound(replace(problem, costs=costs, schedule=find_schedule("zb-h1")))
        <= found.step_s + 1e-9
    )
    limit = problem.memory_limit_bytes
    assert limit is None or evaluation.peak_bytes <= limit


SLOW = Link(8.0, 0.1)


@pytest.mark.parametrize(
    ("devices", "link"),
    grid(product((1, 2, 3), (INFINITE, SLOW)), (2, SLOW), (3, INFINITE)),
)
def test_it_is_no_slower_than_any_rule(devices: int, link: Link) -> None:
    problem = problem_of(13, devices, 6, link == INFINITE, link=link)
    found = find_order(problem)
    checked(problem, found)
    for name in RULES:
        rule = find_schedule(name)
        other = replace(problem, schedule=rule, stages=rule.stages_on(devices))
        stages = evaluate_decision(other, find_planner("jvpipe").decide(other)).stages
        assert found.step_s <= simulated_step_s(other, stages) + 1e-9, name


@pytest.mark.parametrize(
    ("layers", "devices", "micro", "part"),
    grid([(9, 3, 6, 0.9), (9, 2, 6, 0.7), (6, 2, 4, 0.7)], (6, 2, 4, 0.7)),
)
def test_under_a_limit_it_is_no_slower_than_any_rule_that_fits(
    layers: int, devices: int, micro: int, part: float
) -> None:
    free = problem_of(layers, devices, micro)
    keeps = evaluate_decision(free, find_planner("even").decide(free)).peak_bytes
    problem = replace(free, memory_limit_bytes=int(part * keeps))
    found = find_order(problem)
    checked(problem, found)
    for name in RULES:
        rule = find_schedule(name)
        other = replace(problem, schedule=rule, stages=rule.stages_on(devices))
        try:
            decision = find_planner("jvpipe").decide(other)
        except Infeasible:
            continue
        assert (
            found.step_s
            <= simulated_step_s(other, evaluate_decision(other, decision).stages) + 1e-9
        ), name


def test_a_plan_brings_its_lists() -> None:
    problem = problem_of(13, 3, 6)
    found = find_order(problem)
    plan = ask("jvpipe", replace(problem, schedule=AUTO)).plan
    plan.check(13, 3)
    assert lists_of(plan, find_schedule("auto"), 6) == found.schedule.tasks(3, 6)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.thorough
def test_the_same_is_found_again() -> None:
    problem = problem_of(12, 3, 6, 1)
    assert find_order(problem) == find_order(problem)


@pytest.mark.parametrize("seed", grid([0, 1], 0))
def test_it_comes_near_the_bound_where_memory_allows(seed: int) -> None:
    found = find_order(problem_of(24, 3, 12, seed))
    assert found.step_s <= 1.1 * found.bound_s


def test_layers_that_halves_make_slow_stay_whole() -> None:
    problem = problem_of(8, 2, 4)
    slow = replace(problem.costs.layers[3], backward_s=0.1)
    layers = (*problem.costs.layers[:3], slow, *problem.costs.layers[4:])
    assert 3 in find_order(replace(problem, costs=replace(problem.costs, layers=layers))).whole


def test_a_limit_that_nothing_keeps_is_refused_with_one_that_would_do() -> None:
    problem = replace(problem_of(6, 2, 4), memory_limit_bytes=10)
    with pytest.raises(
        Infeasible, match="no order of tasks was found that keeps the limit of 10 bytes per device"
    ) as refused:
        find_order(problem)
    enough = replace(problem, memory_limit_bytes=refused.value.smallest_limit_bytes)
    checked(enough, find_order(enough))


def test_where_idle_devices_lend_all_their_time_the_least_work_wins() -> None:
    problem = problem_of(6, 2, 4)
    dear = tuple(
        replace(layer, backward_s=0.95 * layer.backward_s) for layer in problem.costs.layers
    )
    problem = replace(problem, costs=replace(problem.costs, layers=dear))
    alone, lending = find_order(problem), find_order(replace(problem, lent=1.0))
    every = [one.schedule.tasks(2, 4) for one in (alone, lending)]
    kinds = [{task.kind for tasks in lists for task in tasks} for lists in every]
    assert Kind.W in kinds[0]
    assert Kind.W not in kinds[1]
    assert lending.step_s >= alone.step_s
    work_s = sum(4 * (x.forward_s + x.backward_s) + x.update_s for x in dear)
    assert lending.worth_s == pytest.approx(work_s / 2)


@pytest.mark.parametrize(("lent", "usual"), [(0.0, False), (0.5, False), (0.9, True)])
def test_where_idle_devices_lend_most_of_their_time_little_gain_is_left_alone(
    lent: float, usual: bool
) -> None:
    found = find_order(replace(problem_of(6, 2, 4), lent=lent))
    assert (found.family == ONE_F_ONE_B.name) == usual
    assert found.others[ONE_F_ONE_B.name] > found.bound_s
