"""Planners are asked: for cuts, fates, the order of tasks and devices, and how many devices each stage is to have.

Where stages cannot have several devices, or none should, each has one and cuts and fates are planned as for any number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jvpipe.cost.costs import LayerCost
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner
from jvpipe.planners.cut_reasons import cut_reasons, device_reasons
from jvpipe.planners.joint.device_orders import least_of, worth_searching
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.order_search import OrderedPlan, find_order
from jvpipe.planners.joint.rough_plan import RoughPlan, of_each_kind
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.joint.shape_search import least_bytes_plans, rough_plans, simulated_plans
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.planner import Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.planners.order_reasons import order_reasons, search_reasons, update_reasons
from jvpipe.planners.shape_reasons import shape_reasons, shape_words
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules.auto import AUTO, GivenLists
from jvpipe.session.devices import LIMITS
from jvpipe.session.measuring import Measurement, work_s
from jvpipe.trace.spread import CoupledError

HeldBytes = Callable[[Plan], Sequence[int]]
"""Tells what the fullest device of each stage of a plan holds at most, by the lowered lists."""


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
        seconds = work_s(self.problem.costs.layers)
        return seconds if any(seconds) else None

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated."""
        return simulated_step_s(self.problem, evaluate(self.problem, self.decision).stages)

    def reasons(self, cross_layer: Sequence[str]) -> list[str]:
        """Says how devices differ, why each cut is where it is, and what the order gains.

        Args:
            cross_layer: transformations of the optimizer that need a value of all layers.
        """
        lines = device_reasons(self.problem)
        lines += cut_reasons(self.problem, self.decision)
        lines += order_reasons(self.problem, self.decision, cross_layer)
        lines += update_reasons(self.problem, self.decision)
        if self.ordered:
            lines.append(search_reasons(self.ordered))
        return lines

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
    # Papers do not treat the order of unlike devices.
    chooses = unlike and not find_planner(planner).as_paper and not fixed
    asked = worth_searching(problem) if chooses else [problem]
    return least_of(asked, lambda one: _ask(planner, one, places), lambda planned: planned.step_s)


def _ask(planner: str, problem: Problem, places: Sequence[int] | None) -> Planned:
    """Asks for devices in this order."""
    if problem.schedule != AUTO:
        return answered(planner, problem, find_planner(planner).decide(problem), places)
    ordered = find_order(problem)
    plan = ordered.plan(problem, planner)
    # Groups name their devices themselves.
    if places and not problem.groups:
        plan = plan.on([(places[d],) for stage in plan.stages for d in stage.devices])
    return Planned(plan, ordered.answered(problem), ordered.decision, ordered)


def answered(
    planner: str,
    problem: Problem,
    decision: Decision,
    places: Sequence[int] | None = None,
) -> Planned:
    """Makes a planner's answer of its decision.

    Args:
        planner: its name.
        problem: that was decided.
        decision: its answer.
        places: the device of each stage; those that the problem says unless given.
    """
    # Lists that were sought belong into the plan: no schedule makes them again.
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
            # Shapes may differ only in their devices: the best of these is worth a plan.
            worth.setdefault((plan.shape.replicas, plan.shape.size), plan)
        some = _worth_plans(list(worth.values()))
        best = least_of(some, lambda plan: _of_shape(planner, plan), lambda one: one.step_s)
    return replace(best, shapes=of_each_kind(plans))


def _worth_plans(plans: Sequence[RoughPlan]) -> Sequence[RoughPlan]:
    """Tells which rough plans of different shapes, the fastest first, are planned exactly.

    Where layers are computed again exact fates may win much, and so for any of them; else cuts alone do.
    """
    first = plans[0]
    most_s = SHAPE.worth_a_plan * first.step_s
    again = any(choice < 0 for choice in first.decision.choices)
    return [x for x in plans[: SHAPE.planned] if again or x.step_s <= most_s]


def _of_shape(planner: str, plan: RoughPlan) -> Planned:
    """Plans a shape, at least as fast as the rough plan of it."""
    problem = plan.problem
    if problem.schedule == AUTO:
        return _ask(planner, problem, None)
    # The climb begins with the rough plan, if that is one of this problem.
    fits = plan.evaluation.limit_bytes <= (problem.memory_limit_bytes or math.inf)
    begin = [plan.decision] if fits and len(plan.decision.bounds) == problem.stages + 1 else []
    return answered(planner, problem, under_rule(problem, begin))


def _of_paper(planner: Planner, shapes: Shapes) -> list[RoughPlan]:
    """Returns a paper's plans, one for each size of micro-batches that it can plan, the fastest first."""
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
    """Makes the error of a paper's planner that has no plan: it names a limit under which it has one."""
    limit = shapes.model.memory_limit_bytes
    assert limit is not None, "without a limit every planner has a plan"

    def finds(limit_bytes: int) -> bool:
        return bool(_of_paper(planner, shapes.under(limit_bytes)))

    enough = max(limit + 1, least_bytes_plans(shapes)[0].evaluation.limit_bytes)
    # It ends, because a planner has a plan once the limit is large enough.
    while not finds(enough):
        enough += enough // 8 + 1
    return Infeasible(
        f"{planner.name} has no plan that fits into {limit} bytes per device: with {enough} bytes it has, "
        f"{enough - limit} more. Use more devices, or planner 'jvpipe'",
        stage=0,
        excess_bytes=enough - limit,
        smallest_limit_bytes=enough,
    )


# How many devices each stage of a pipeline is to have: layers are measured on slices, and the planner asked.


@dataclass(frozen=True)
class ChosenShape:
    """How many places a pipeline has, and why, in lines; `planned` if some of them have several devices."""

    places: int
    why: tuple[str, ...]
    planned: Planned | None = None


def find_shape(measurement: Measurement, held_bytes_of: HeldBytes) -> ChosenShape:
    """Finds the shape of the fastest simulated step under the limit.

    Args:
        measurement: measures the model, and says what is wanted.
        held_bytes_of: what the fullest device of each stage of a plan holds, by the lowered lists.
    """
    settings = measurement.settings
    if refusal := _refusal(measurement):
        return _one_each(measurement, refusal)
    try:
        local, least = measurement.slices()
    except CoupledError as coupled:
        return _one_each(measurement, str(coupled))
    stages = settings.stages if isinstance(settings.stages, int) else None
    # The size of a micro-batch is fixed here: the model is traced at it.
    pins = Pins(stages, size=measurement.traced.graph.examples, least_slice=least)
    shapes = asked = measurement.shapes(local, pins)
    for _ in range(LIMITS.attempts):
        try:
            planned = ask_shapes(settings.planner, asked)
        except Infeasible:
            break
        problem = planned.problem
        step = f"step {1e3 * planned.step_s:.2f} ms simulated"
        summary = f"on {shapes.devices} devices {shape_words(problem)}: {step}"
        why = (summary, *shape_reasons(shapes, problem, planned.decision, planned.shapes))
        if not problem.replicated:
            return ChosenShape(problem.devices, why)
        try:
            device_bytes = held_bytes_of(planned.plan)
        except ValueError as unlike:  # a layer leaves other things on slices than on the whole
            return _one_each(measurement, str(unlike))
        limits = [problem.limit_of(place) or math.inf for place in problem.places]
        over = max(size - limit for size, limit in zip(device_bytes, limits, strict=True))
        if over <= 0:
            return ChosenShape(problem.devices, why, planned)
        # The next plan is asked for under a limit that is smaller by what this one holds too much.
        tighter = (asked.model.memory_limit_bytes or 0) - int(over)
        asked = asked.under(max(1, tighter))
    limit = shapes.model.memory_limit_bytes
    why_not = f"no plan with replicas was found that keeps the limit of {limit} bytes"
    return _one_each(measurement, why_not)


def _one_each(measurement: Measurement, why: str) -> ChosenShape:
    """Returns as many stages of one device each as are asked for, or as there can be; `why` they have no more."""
    settings, layers = measurement.settings, len(measurement.traced.graph.layers)
    places = settings.stages
    if not isinstance(places, int):
        places = max(1, min(len(measurement.devices), layers // settings.schedule.chunks))
    return ChosenShape(places, (f"each stage has one device: {why}",))


def _refusal(measurement: Measurement) -> str:
    """Says why stages cannot have several devices, whatever the loss is; nothing if they can."""
    schedule = measurement.settings.schedule
    try:
        check_replicable(schedule)
    except ValueError as cannot:
        return str(cannot)
    if not schedule.synchronous:
        return f"under {schedule.name} they are not planned yet"
    return "there are no more" if len(measurement.devices) < 2 else ""
