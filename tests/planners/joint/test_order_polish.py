"""Polishing: never slower as simulated, in the order of sums, and as good as trying everything where
one can.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest

from jvpipe.cost.hardware import Link
from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.planners.joint.order_polish import polished
from jvpipe.planners.joint.ordered_plan import OrderedPlan, simulated_plan, under
from jvpipe.planners.joint.rule_search import RuledPlan, fitting
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, keeps_limits
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import OneFOneB
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import placed, problem_of

SLOW = Link(1.0)

RULES = [find_schedule(name) for name in ("1f1b", "interleaved", "zb-h1", "v-half")]
RULES.append(OneFOneB(eager=True))


def shared(layers: int, devices: int, microbatches: int, seed: int) -> Problem:
    """A problem whose sends take the links to the host."""
    problem = problem_of(layers, devices, microbatches, seed, link=SLOW)
    return replace(problem, peer_uses_host=True)


def simulated(problem: Problem, schedule: Schedule) -> tuple[RuledPlan, OrderedPlan]:
    """Even cuts in a rule's order, and its simulation."""
    one = RuledPlan.of(*placed(problem, schedule))
    (one,) = fitting(one, one.order)
    plan = simulated_plan(one)
    assert plan is not None
    return one, plan


def least_s(one: RuledPlan, plan: OrderedPlan) -> float:
    """The seconds of the plan after polishing."""
    return min(better.step_s for better in [plan, *polished([(one, plan)])])


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_plans_become_no_slower_and_sums_stay_in_order(schedule: Schedule) -> None:
    one, plan = simulated(shared(12, 3, 5, seed=0), schedule)
    (better,) = list(polished([(one, plan)])) or [plan]
    assert better.step_s <= plan.step_s
    assert better.decision == plan.decision
    again = under(one.problem, better.schedule)
    assert keeps_limits(again, evaluate_decision(again, better.decision))
    for tasks in again.schedule.tasks(3, 5):
        for stage in {task.stage for task in tasks}:
            sums = [t.microbatch for t in tasks if t.stage == stage and t.kind in ("B", "W")]
            assert sums == list(range(5))


def test_eager_forwards_wait_for_shared_links_until_their_order_is_polished() -> None:
    gains = []
    for seed in range(3):
        one, plan = simulated(shared(12, 4, 8, seed), OneFOneB(eager=True))
        gains.append(1 - least_s(one, plan) / plan.step_s)
    assert max(gains) > 0.02, gains


def lawful(tasks: Sequence[Task]) -> bool:
    """Whether each kind runs micro-batch by micro-batch, and forwards come before backwards."""
    at = {(task.kind, task.microbatch): n for n, task in enumerate(tasks)}
    kinds = list(dict.fromkeys(sorted((task.kind for task in tasks), key="FBIW".index)))
    by_kind = all(at[kind, 0] < at[kind, 1] for kind in kinds)
    return by_kind and all(at[a, m] < at[b, m] for a, b in pairwise(kinds) for m in range(2))


def test_two_devices_and_micro_batches_are_as_good_as_trying_everything() -> None:
    kinds = (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)
    of_devices = []
    for s in range(2):
        tasks = [Task(s, kind, m) for kind in kinds[s] for m in range(2)]
        of_devices.append([order for order in permutations(tasks) if lawful(order)])
    for seed in range(3):
        one, plan = simulated(shared(4, 2, 2, seed), find_schedule("zb-h1"))
        every = (fitting(one, both) for both in product(*of_devices))
        plans = [simulated_plan(other) for found in every for other in found]
        steps_s = [other.step_s for other in plans if other]
        assert least_s(one, plan) <= min(steps_s) + 1e-9
