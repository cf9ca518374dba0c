"""Chooses the order of unlike devices along the pipeline: which device runs which stage.

If there are few different orders, all are tried. If there are many, at most five are tried: the
given order, and the orders by speed and by memory, each rising and falling. Only the most promising
orders get a whole search (`PLAN.searched_orders`).

The promise of an order is the fewest seconds of a step by the surrogate (`stage_cost.py`). The
surrogate covers only one stage per device and whole backwards. For any other schedule, it counts
the seconds of 1F1B. Orders of devices for which no plan fits come after all others, and are
compared by the smallest limit that suffices. If the order of tasks is open (`schedule="auto"`),
this is the smallest limit with one micro-batch in flight at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import factorial, prod
from typing import TypeVar

from jvpipe.planners.joint.effort import PLAN
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.order_floor import order_floors
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import sorted_orders
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

Asked = TypeVar("Asked")
T = TypeVar("T")
Kind = tuple[tuple[float, ...], int]
"""Speed and memory of a device, as in `Group.kind`; devices of one kind can replace each other."""


def orders(problem: Problem) -> list[Problem]:
    """Lists the problem with its devices in each order that is tried, the given order first.

    Devices of the same kind stay in the given order among themselves.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 6)
    >>> problem = Problem(costs, 3, find_schedule("1f1b"), 4)
    >>> problem = problem.told_apart([(), (2.0,) * 6, ()], [9, 9, 9])
    >>> [one.where for one in orders(problem)]
    [((0,), (1,), (2,)), ((0,), (2,), (1,)), ((1,), (0,), (2,))]
    """
    groups = problem.groups
    if not groups or problem.replicated:
        return [problem]
    devices = range(len(groups))
    kinds = [group.kind for group in groups]
    some = _distinct(kinds, devices) if _all_orders(problem) else sorted_orders(groups)
    # Orders with the same kinds of devices in the same places are the same problem, so only the
    # first of them is kept.
    by_kind: dict[tuple[Kind, ...], list[int]] = {}
    for order in [list(devices), *some]:
        by_kind.setdefault(tuple(kinds[d] for d in order), order)
    return [problem.in_order(order) for order in by_kind.values()]


def _all_orders(problem: Problem) -> bool:
    """Tells whether there are few enough orders of kinds to try all of them."""
    counts = Counter(group.kind for group in problem.groups).values()
    alike = prod(map(factorial, counts))
    return factorial(len(problem.groups)) // alike <= PLAN.device_orders


def _distinct(kinds: Sequence[Kind], left: Sequence[int]) -> Iterator[list[int]]:
    """Yields one order of the devices in `left` for each arrangement of their kinds."""
    if not left:
        yield []
    for kind in dict.fromkeys(kinds):
        # The first device of a kind is taken, so devices of a kind stay in the given order.
        first = next((d for d in left if kinds[d] == kind), None)
        if first is not None:
            others = [d for d in left if d != first]
            yield from ([first, *rest] for rest in _distinct(kinds, others))


def worth_searching(problem: Problem) -> list[Problem]:
    """Lists the problem in the most promising orders of devices (`PLAN.searched_orders`)."""
    every = orders(problem)
    if len(every) <= PLAN.searched_orders:
        return every
    return sorted(every, key=_promise)[: PLAN.searched_orders]


def _promise(problem: Problem) -> tuple[float, float]:
    """Returns the seconds of a step and 0; infinity and the smallest limit if no plan fits."""
    is_chunked = problem.schedule == AUTO or problem.schedule.chunks > 1
    asked = problem
    if is_chunked or problem.splits:
        asked = replace(
            problem,
            stages=problem.devices,
            schedule=ONE_F_ONE_B,
        )
    try:
        decision = jvpipe(asked, refine=False)
        return evaluate_decision(asked, decision).step_s, 0.0
    except Infeasible as error:
        least = error.smallest_limit_bytes
        if problem.schedule == AUTO:
            least = next(order_floors(problem, [ONE_F_ONE_B])).limit_bytes
        return math.inf, float(least)


def least_bound(problem: Problem) -> float:
    """Bounds from below the simulated step of any plan, in any order of devices.

    If there are too many orders to bound each, all devices count as equally good: each takes the
    seconds of the fastest device for every layer, and has the memory of the largest.
    """
    if not problem.groups or problem.replicated:
        return lower_bound(problem)
    if _all_orders(problem):
        return min(map(lower_bound, orders(problem)))
    every = [group.slowness or (1.0,) * len(problem.costs.layers) for group in problem.groups]
    fastest = tuple(map(min, zip(*every, strict=True)))
    best = tuple(replace(group, slowness=fastest, less_bytes=0) for group in problem.groups)
    return lower_bound(replace(problem, groups=best))


def least_of(
    problems: Sequence[Asked],
    ask: Callable[[Asked], T],
    step_s: Callable[[T], float],
) -> T:
    """Solves several problems, and returns the answer with the fastest step.

    Args:
        problems: at least one; they differ in their devices, or in the order of their devices.
        ask: answers a problem, or raises `Infeasible`.
        step_s: returns the seconds of an answer's step.

    Raises:
        Infeasible: no problem has an answer. The error with the smallest limit is raised.
    """
    answers = list[T]()
    refused = list[Infeasible]()
    for problem in problems:
        try:
            answers.append(ask(problem))
        except Infeasible as error:
            refused.append(error)
    if not answers:
        raise min(refused, key=lambda error: error.smallest_limit_bytes)
    return min(answers, key=step_s) if len(answers) > 1 else answers[0]
