"""Planners are asked: for the cuts and fates of a problem, for the order of its tasks and devices, for its shape."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jvpipe.cost.costs import LayerCost
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.device_orders import least_of, worth_searching
from jvpipe.planners.joint.order_search import OrderedPlan, find_order
from jvpipe.planners.joint.rough_plan import RoughPlan, of_each_kind
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.joint.shape_search import (
    ShapeEffort,
    least_bytes_plans,
    rough_plans,
    simulated_plans,
)
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.planner import Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules.auto import AUTO, GivenLists


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was decided on.

    `ordered` is what is known of an order that was searched for, `shapes` the best rough plan of each kind of shape
    where that was decided too.
    """

    plan: Plan
    problem: Problem
    decision: Decision
    ordered: OrderedPlan | None = None
    shapes: Mapping[str, RoughPlan] = field(default_factory=dict)

    @property
    def layer_s(self) -> list[float] | None:
        """Seconds of each layer's forward and backward on the device that was measured, if one was."""
        seconds = [layer.forward_s + layer.backward_s for layer in self.problem.costs.layers]
        return seconds if any(seconds) else None

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated."""
        return simulated_step_s(self.problem, evaluate(self.problem, self.decision).stages)

    @property
    def placed(self) -> list[LayerCost]:
        """The layers, as the devices take them that they are on."""
        stages = enumerate(pairwise(self.decision.bounds))
        return [layer for s, (i, j) in stages for layer in self.problem.layers_on(s)[i:j]]

    @property
    def recompute_s(self) -> float:
        """Seconds per step of all devices together that go into what layers do not keep."""
        chosen = zip(self.placed, self.decision.choices, strict=True)
        return self.problem.microbatches * sum(
            layer.options[c].extra_s for layer, c in chosen if c >= 0
        )


def ask(
    planner: str, problem: Problem, places: Sequence[int] | None = None, *, fixed: bool = False
) -> Planned:
    """Asks a planner, and for the order of tasks too where it is left open; `jvpipe` also for that of unlike devices.

    Args:
        planner: by its name.
        problem: to be answered; that of the answer has its order.
        places: of the stages, or of the devices where the order is open; their numbers unless given. Unlike devices
            have numbers of their own.
        fixed: the devices stay in the order that they have.

    Raises:
        Infeasible: it finds nothing that keeps the limit.
    """
    unlike = problem.groups and not problem.replicated
    chooses = unlike and not find_planner(planner).as_paper and not fixed
    asked = worth_searching(problem) if chooses else [problem]
    return least_of(asked, lambda one: _ask(planner, one, places), lambda planned: planned.step_s)


def _ask(planner: str, problem: Problem, places: Sequence[int] | None) -> Planned:
    """The answer for devices in this order."""
    if problem.schedule != AUTO:
        return answered(planner, problem, find_planner(planner).decide(problem), places)
    ordered = find_order(problem)
    plan = ordered.plan(problem, planner)
    if places and not problem.groups:
        plan = plan.on([(places[d],) for stage in plan.stages for d in stage.devices])
    return Planned(plan, ordered.answered(problem), ordered.decision, ordered)


def answered(
    planner: str,
    problem: Problem,
    decision: Decision,
    places: Sequence[int] | None = None,
) -> Planned:
    """A decision as a planner's answer.

    Args:
        planner: its name.
        problem: that was decided.
        decision: its answer.
        places: the device of each stage; those that the problem says unless given.
    """
    lists = problem.schedule.lists
    where = None if problem.groups or places is None else [(place,) for place in places]
    plan = decision.plan(problem, planner, where)
    plan = replace(plan, tasks=lists.lines) if isinstance(lists, GivenLists) else plan
    return Planned(plan, problem, decision)


def ask_shapes(planner: str, shapes: Shapes) -> Planned:
    """Asks a planner that decides how many devices each stage has, and the examples of a micro-batch.

    Args:
        planner: by its name.
        shapes: those that there are.

    Raises:
        Infeasible: no plan keeps the limits; with one that would do.
        ValueError: something is given that the planner decides, or it cannot use so many devices.
    """
    chosen = find_planner(planner)
    plans = _of_paper(chosen, shapes) if chosen.shape_rule else rough_plans(shapes)
    if chosen.shape_rule:
        if not plans:
            raise _nothing_fits(chosen, shapes)
        best = answered(planner, plans[0].problem, plans[0].decision)
    else:
        worth: dict[tuple[tuple[int, ...], int], RoughPlan] = {}
        for plan in plans or least_bytes_plans(shapes):
            # Of shapes that differ in which devices there are, the best is worth a plan.
            worth.setdefault((plan.shape.replicas, plan.shape.size), plan)
        some = _worth_plans(list(worth.values()))
        best = least_of(some, lambda plan: _of_shape(planner, plan), lambda one: one.step_s)
    return replace(best, shapes=of_each_kind(plans))


def _worth_plans(plans: Sequence[RoughPlan]) -> Sequence[RoughPlan]:
    """Which rough plans of different shapes, the fastest first, are planned exactly.

    Where layers are computed again exact fates may win much, and so for any of them; else cuts alone do.
    """
    effort, first = ShapeEffort(), plans[0]
    most_s = effort.worth_a_plan * first.step_s
    again = any(choice < 0 for choice in first.decision.choices)
    return [x for x in plans[: effort.planned] if again or x.step_s <= most_s]


def _of_shape(planner: str, plan: RoughPlan) -> Planned:
    """The plan of a shape, which is at least as fast as the rough one."""
    problem = plan.problem
    if problem.schedule == AUTO:
        return _ask(planner, problem, None)
    fits = plan.evaluation.limit_bytes <= (problem.memory_limit_bytes or math.inf)
    begin = [plan.decision] if fits and len(plan.decision.bounds) == problem.stages + 1 else []
    return answered(planner, problem, under_rule(problem, begin))


def _of_paper(planner: Planner, shapes: Shapes) -> list[RoughPlan]:
    """A paper's plans, one for each size of micro-batches for which it has one, the fastest simulated first."""
    if shapes.pins.count is not None:
        raise ValueError(
            f"planner '{planner.name}' decides stages, replicas and cuts itself: leave them out, or use planner "
            "'jvpipe'"
        )
    assert planner.shape_rule is not None
    segments = LocalSegments(shapes)
    paths = (planner.shape_rule(segments, size) for size in shapes.sizes)
    return simulated_plans(shapes, filter(None, paths))


def _nothing_fits(planner: Planner, shapes: Shapes) -> Infeasible:
    """The error when a paper's planner has no plan: it names a limit under which it has one."""
    limit = shapes.model.memory_limit_bytes
    assert limit is not None, "without a limit every planner has a plan"

    def finds(limit_bytes: int) -> bool:
        return bool(_of_paper(planner, shapes.under(limit_bytes)))

    enough = max(limit + 1, least_bytes_plans(shapes)[0].evaluation.limit_bytes)
    while not finds(enough):
        enough += enough // 8 + 1
    return Infeasible(
        f"{planner.name} has no plan that fits into {limit} bytes per device: with {enough} bytes it has, "
        f"{enough - limit} more. Use more devices, or planner 'jvpipe'",
        stage=0,
        excess_bytes=enough - limit,
        smallest_limit_bytes=enough,
    )
