"""Calls a planner by its name: `ask` returns a plan, and `ask_shapes` also chooses the devices."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.device_orders import least_of, worth_searching
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.joint.ordered_plan import under
from jvpipe.planners.joint.rough_plan import RoughPlan, of_each_kind
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.joint.shape_search import least_bytes_plans, rough_plans, simulated_plans
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.planner import Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.planned_problem import Planned
from jvpipe.schedules.auto import AUTO, GivenLists, lines_of


def ask(
    planner: str, problem: Problem, places: Sequence[int] | None = None, *, fixed: bool = False
) -> Planned:
    """Makes a plan with a planner, including the order of tasks if the problem leaves it open.

    If devices differ in speed or memory ("unlike" devices), jvpipe's own planner also chooses which
    device each stage gets.

    Args:
        planner: the name of the planner.
        problem: the problem to solve. The problem in the result has the chosen order of tasks and
            devices.
        places: the device of each stage, or of each place if the order of tasks is open; by default
            0, 1, 2 and so on. Ignored for unlike devices, because the problem has their numbers.
        fixed: whether unlike devices keep the order that they have in the problem.

    Raises:
        Infeasible: the planner finds no plan that keeps the limit.
    """
    unlike = problem.groups and not problem.replicated
    # The papers' planners use unlike devices in the order that the problem has.
    chooses = unlike and not find_planner(planner).as_paper and not fixed
    asked = worth_searching(problem) if chooses else [problem]
    return least_of(asked, lambda one: _ask(planner, one, places), lambda planned: planned.step_s)


def _ask(planner: str, problem: Problem, places: Sequence[int] | None) -> Planned:
    """Makes a plan with the devices in the order that the problem has."""
    if problem.schedule != AUTO:
        return answered(planner, problem, find_planner(planner).decide(problem), places)
    ordered = find_order(problem)
    asked = under(problem, ordered.schedule)
    where = [places[place] for place in asked.places] if places else None
    planned = answered(planner, asked, ordered.decision, where)
    ids = problem.costs.ids or range(len(problem.costs.layers))
    plan = replace(planned.plan, unsplit=tuple(ids[at] for at in ordered.whole))
    return replace(planned, plan=plan, ordered=ordered)


def answered(
    planner: str,
    problem: Problem,
    decision: Decision,
    places: Sequence[int] | None = None,
) -> Planned:
    """Makes a plan from a planner's decision.

    Args:
        planner: the name of the planner.
        problem: the problem that the planner has solved.
        decision: the planner's decision.
        places: the device of each stage; by default, those of the problem.
    """
    # The plan stores task lists that a search has found, because no schedule can generate them.
    lists = problem.schedule.lists
    # If devices are unlike, the problem's groups have their numbers, and `places` is ignored.
    where = None if problem.groups or places is None else [(place,) for place in places]
    plan = decision.plan(problem, planner, where)
    if isinstance(lists, GivenLists):
        plan = replace(plan, tasks=lines_of(lists.lists))
    return Planned(plan, problem, decision)


def ask_shapes(planner: str, shapes: Shapes) -> Planned:
    """Makes a plan with a planner that also decides each stage's devices and the micro-batch size.

    Args:
        planner: the name of the planner.
        shapes: the shapes to choose from. A shape says which devices each stage has, and how many
            examples a micro-batch has.

    Raises:
        Infeasible: no plan keeps the limits; the error has a limit that some plan keeps.
        ValueError: the user fixes a part of the shape that this planner decides itself, or the
            planner cannot use that many devices.
    """
    chosen = find_planner(planner)
    if chosen.shape_rule:
        plans = _of_paper(chosen, shapes)
        if not plans:
            raise _nothing_fits(chosen, shapes)
        best = answered(planner, plans[0].problem, plans[0].decision)
    else:
        plans = rough_plans(shapes)
        worth: dict[tuple[tuple[int, ...], int], RoughPlan] = {}
        for plan in plans or least_bytes_plans(shapes):
            # If shapes differ only in which devices a stage has, only the first shape is kept.
            worth.setdefault((plan.shape.replicas, plan.shape.size), plan)
        some = _worth_plans(list(worth.values()))
        best = least_of(some, lambda plan: _of_shape(planner, plan), lambda one: one.step_s)
    return replace(best, shapes=of_each_kind(plans))


def _worth_plans(plans: Sequence[RoughPlan]) -> Sequence[RoughPlan]:
    """Returns the rough plans whose shapes are worth an exact plan.

    The plans are sorted, the fastest first. A rough plan keeps or recomputes all values of a stage.
    If the fastest plan recomputes, an exact plan may save much time by choosing a fate for each
    value, so slower shapes are returned too. If the fastest plan keeps everything, an exact plan
    can only improve the cuts, which saves little. Shapes that take more than `SHAPE.worth_a_plan`
    times as long are then left out. At most `SHAPE.planned` plans are returned.
    """
    first = plans[0]
    most_s = SHAPE.worth_a_plan * first.step_s
    again = any(choice < 0 for choice in first.decision.choices)
    return [x for x in plans[: SHAPE.planned] if again or x.step_s <= most_s]


def _of_shape(planner: str, plan: RoughPlan) -> Planned:
    """Returns the best exact plan that the search finds with the shape of a rough plan."""
    problem = plan.problem
    if problem.schedule == AUTO:
        return _ask(planner, problem, None)
    # The search begins with the rough plan if that plan keeps the limit and has the problem's
    # number of stages. The result is then at least as fast as the rough plan.
    fits = plan.evaluation.limit_bytes <= (problem.memory_limit_bytes or math.inf)
    has_all_stages = len(plan.decision.bounds) == problem.stages + 1
    begin = [plan.decision] if fits and has_all_stages else []
    return answered(planner, problem, under_rule(problem, begin))


def _of_paper(planner: Planner, shapes: Shapes) -> list[RoughPlan]:
    """Returns a paper's plans, one for each usable size of micro-batches, the fastest first."""
    if shapes.pins.count is not None:
        raise ValueError(
            f"planner '{planner.name}' decides stages, replicas and cuts itself: leave "
            "them out, or use planner 'jvpipe'"
        )
    assert planner.shape_rule is not None
    segments = LocalSegments(shapes)
    paths = (planner.shape_rule(segments, size) for size in shapes.sizes)
    return simulated_plans(shapes, filter(None, paths))


def _nothing_fits(planner: Planner, shapes: Shapes) -> Infeasible:
    """Makes the error of a paper's planner that finds no plan, with a limit that suffices."""
    limit = shapes.model.memory_limit_bytes
    assert limit is not None, "without a limit every planner has a plan"

    def finds(limit_bytes: int) -> bool:
        return bool(_of_paper(planner, shapes.under(limit_bytes)))

    least = least_bytes_plans(shapes)[0]
    enough = max(limit + 1, least.evaluation.limit_bytes)
    # The loop ends, because every planner has a plan once the limit is large enough.
    while not finds(enough):
        enough += enough // 8 + 1
    return Infeasible(
        f"{planner.name} finds no plan that keeps {least.problem.limit_said}: it finds one "
        f"with {least.problem.enough_said(enough)}. Raise the limit, use more devices, or "
        "use planner 'jvpipe'",
        smallest_limit_bytes=enough,
    )
