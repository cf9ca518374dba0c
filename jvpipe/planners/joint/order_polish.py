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

from jvpipe.ir.task import TaskLists
from jvpipe.planners.joint.effort import ORDER
from jvpipe.planners.joint.order_climb import all_moves, make
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_refine import CLIMBED
from jvpipe.planners.joint.ordered_plan import OrderedPlan, simulated_plan
from jvpipe.planners.joint.rule_search import RuledPlan
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.util.sizes import ROUNDING


def polished(simulated: Sequence[tuple[RuledPlan, OrderedPlan]]) -> Iterator[OrderedPlan]:
    """Yields the fastest plans again, each in the fastest order that is found for it.

    It leaves out plans that are not near the fastest, and those whose seconds `order_course.py`
    counts exactly, because the climb has improved their orders already.

    Args:
        simulated: candidates, whose orders the search begins with, and their simulated plans.
    """
    least_s = min((plan.worth_s for _, plan in simulated), default=0.0)
    near = [pair for pair in simulated if pair[1].worth_s <= ORDER.near_polish * least_s]
    inexact = list[tuple[RuledPlan, OrderedPlan]]()
    for one, plan in near:
        counted_s = Course(one.loads, one.order).step_s
        if abs(plan.step_s - counted_s) > ROUNDING * plan.step_s:
            inexact.append((one, plan))
    inexact.sort(key=lambda pair: pair[1].worth_s)
    for one, plan in inexact[: ORDER.polished]:
        search = _Polish(one, plan)
        while search.step():
            pass
        yield search.best


class _Polish:
    """A search from one order: the best plan so far, and the orders that are simulated already."""

    def __init__(self, one: RuledPlan, plan: OrderedPlan) -> None:
        """Begins with a candidate and its simulated plan."""
        tasks = sum(map(len, one.order))
        family = one.family.removesuffix(CLIMBED) + CLIMBED
        self.one = replace(one, family=family)
        self.best = plan
        self.stages = evaluate_decision(one.listed, one.decision).stages
        self.course = Course(one.loads, one.order)
        self.seen = {one.order}
        self.left = ORDER.polished_tasks // max(1, tasks)

    def step(self) -> bool:
        """Makes the first move that shortens the step; tells whether there is one."""
        course = self.course
        course.follow()
        for move in sorted(all_moves(course)):
            if self.left <= 0:
                return False
            back = make(course, move)
            if self._is_faster(course.order):
                return True
            make(course, back)
        return False

    def _is_faster(self, order: TaskLists) -> bool:
        """Simulates the course's order; keeps it if the step is shorter and memory suffices."""
        if order in self.seen:
            return False
        self.seen.add(order)
        # The course's seconds are a lower bound, because they leave out waits and swaps. They are
        # infinite if tasks wait in a circle.
        self.course.run()
        is_slower = self.course.step_s >= self.best.step_s * (1 - ROUNDING)
        if is_slower or not self.one.loads.fits(order):
            return False
        self.left -= 1
        other = replace(self.one, order=order)
        step_s = simulated_step_s(other.listed, self.stages)
        if step_s >= self.best.step_s * (1 - ROUNDING):
            return False
        plan = simulated_plan(other)  # counts what devices hold in this order exactly
        if plan is None or plan.worth_s >= self.best.worth_s:
            return False
        self.best = plan
        return True
