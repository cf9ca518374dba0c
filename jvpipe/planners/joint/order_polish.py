"""Improves the order of a plan by moves that are judged by the simulator.

The climb of `order_climb.py` judges orders by the times of `order_course.py`. These leave out swaps
and the waits of transfers that share a link. If a plan has either, the order that these times
prefer may not be the fastest. So this file changes the plan's order once more by the same moves,
and simulates each order:

    1. List    all moves of the order, the most promising first by the times without waits.
    2. Try     one after the other, until the simulated step becomes shorter.
    3. Repeat  from the shorter order, until no move helps or `ORDER.polished_tasks` are simulated.

This ends, because each repetition begins with a shorter step, and no order is simulated twice. The
simulation of an order takes far longer than `Course.run`, but few orders are needed: some fifty
make 1F1B with eager forwards 4 to 5% faster if links pass through a host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jvpipe.planners.joint.effort import ORDER
from jvpipe.planners.joint.order_climb import Move, all_moves, make
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_refine import CLIMBED
from jvpipe.planners.joint.ordered_plan import OrderedPlan, simulated_plan
from jvpipe.planners.joint.rule_search import RuledPlan
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.util.sizes import ROUNDING


def polished(simulated: Sequence[tuple[RuledPlan, OrderedPlan]]) -> Iterator[OrderedPlan]:
    """Yields the fastest plans again, each in the fastest order that is found for it.

    It leaves out plans whose seconds `order_course.py` counts exactly, because the climb has
    improved their orders already.

    Args:
        simulated: candidates, whose orders the search begins with, and their simulated plans.
    """
    inexact = list[tuple[RuledPlan, OrderedPlan]]()
    for one, plan in simulated:
        counted_s = Course(one.loads, one.order).step_s
        if abs(plan.step_s - counted_s) > ROUNDING * plan.step_s:
            inexact.append((one, plan))
    inexact.sort(key=lambda pair: pair[1].worth_s)
    for one, plan in inexact[: ORDER.polished]:
        yield _polished(one, plan)


def _polished(one: RuledPlan, best: OrderedPlan) -> OrderedPlan:
    """Searches from one order; returns the best plan found, which may be the given one.

    Args:
        one: the candidate.
        best: its simulated plan.
    """
    tasks = sum(map(len, one.order))
    left = ORDER.polished_tasks // max(1, tasks)  # how many orders may still be simulated
    seen = {one.order}
    one = replace(one, family=one.family.removesuffix(CLIMBED) + CLIMBED)
    stages = evaluate_decision(one.listed, one.decision).stages
    course = Course(one.loads, one.order)
    moves = _moves(course)
    while moves and left > 0:
        back = make(course, moves.pop())
        order = course.order
        plan = None
        short_s = best.step_s * (1 - ROUNDING)
        if order not in seen:
            seen.add(order)
            course.run()
            # The course's seconds are a lower bound, because they leave out waits and swaps. They
            # are infinite if tasks wait in a circle.
            if course.step_s < short_s and one.loads.fits(order):
                left -= 1
                other = replace(one, order=order)
                if simulated_step_s(other.listed, stages) < short_s:
                    plan = simulated_plan(other)  # counts what devices hold in this order exactly
        if plan and plan.worth_s < best.worth_s:
            best = plan
            moves = _moves(course)
        else:
            make(course, back)
    return best


def _moves(course: Course) -> list[Move]:
    """Lists all moves of an order whose times are known, the most promising one last."""
    course.follow()
    return sorted(all_moves(course), reverse=True)
