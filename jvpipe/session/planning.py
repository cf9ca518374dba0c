"""Planners are asked: for cuts, fates, the order of tasks and devices, and how many devices each stage is to have.

A planner counts by closed forms what a run holds. So under a limit its answer is lowered, and it is
asked again under a smaller one until a run of the answer keeps the limit. Whether any plan keeps it
is decided on bytes alone.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from jvpipe.cost.costs import LayerCost
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import FateRule, find_planner
from jvpipe.planners.cut_reasons import cut_reasons, device_reasons
from jvpipe.planners.joint.device_orders import least_of, orders, worth_searching
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.floor import Floor, floor
from jvpipe.planners.joint.order_search import OrderedPlan, find_order
from jvpipe.planners.joint.rough_plan import RoughPlan, of_each_kind
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.joint.shape_search import least_bytes_plans, rough_plans, simulated_plans
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.planner import Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.order_reasons import order_reasons, search_reasons, update_reasons
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, GivenLists, given_lists, lines_of
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

_log = logging.getLogger("jvpipe")
Slowness = tuple[float, ...]
"""How many times longer a device takes for each layer than the first one; nothing if as long."""
HeldBytes = Callable[[Plan], Sequence[int]]
"""Tells what the fullest device of each stage of a plan holds at most, by the lowered lists."""


@dataclass(frozen=True)
class AskingEffort:
    """How long a plan is sought whose run keeps a memory limit.

    Attributes:
        attempts: how often a planner is asked, each time under a limit that is smaller by as much
            as the run of its answer would be over it.
        signings: how often a planner is asked until the hardware's compiler finds that a plan keeps
            it.
        counted_times: how many times what a run holds the planner may have counted, at most.
        noticed: by how much longer steps are than with everything kept, from which on a plan is
            asked for whose optimizer state leaves.
    """

    attempts: int = 5
    signings: int = 8
    counted_times: float = 1.2
    noticed: float = 0.01


ASKING = AskingEffort()


def work_s(layers: Iterable[LayerCost]) -> list[float]:
    """Returns the seconds of each layer's forward and backward."""
    return [layer.forward_s + layer.backward_s for layer in layers]


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was decided on.

    `ordered` is what is known of an order that was searched for, `shapes` the best rough plan of
    each kind of shape where that was decided too.
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
        return simulated_step_s(self.problem, evaluate_decision(self.problem, self.decision).stages)

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
        places: of the stages, or of the devices where the order is open; their numbers unless
            given. Unlike devices have numbers of their own.
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

    Where layers are computed again exact fates may win much, and so for any of them; else cuts
    alone do.
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


class _Least(NamedTuple):
    """The plan that holds the least, and the order of devices that it is for."""

    floor: Floor
    problem: Problem


@dataclass(frozen=True)
class _Asker:
    """A planner that is asked until its answer keeps a limit, by the bytes that a run of it would hold.

    Limits are those of the roomiest device. A device that may hold less by some bytes counts as if
    it held these too, so that one number says whether a plan keeps all limits.

    Args:
        planner: its name.
        places: the device of each stage.
        fixed: unlike devices stay in the order that they have.
        held_bytes_of: what the device of each stage of a plan holds at most, by the lowered lists.
    """

    planner: str
    places: tuple[int, ...]
    fixed: bool
    held_bytes_of: HeldBytes

    def ask(self, problem: Problem) -> Planned:
        """Asks once."""
        return ask(self.planner, problem, self.places, fixed=self.fixed)

    def needed(self, problem: Problem, plan: Plan) -> list[int]:
        """Returns the limit, of the roomiest device, that each stage of a plan needs.

        Args:
            problem: says by how much less other devices may hold.
            plan: in question.
        """
        # By its devices a stage is found again in whatever order the problem has them.
        less = {group.devices: group.less_bytes for group in problem.groups}
        stage_sizes = zip(self.held_bytes_of(plan), plan.stages, strict=True)
        return [size + less.get(stage.devices, 0) for size, stage in stage_sizes]

    def unlimited(self, problem: Problem) -> Planned | None:
        """Asks a planner that chooses fates without a limit.

        Returns the plan if the lists say that it keeps the limit. It may keep it even if the
        planner, whose count is near what the lists hold and never much below it, counts more.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        counted_limit = ASKING.counted_times * limit
        chooses = find_planner(self.planner).chooses_fates
        if not chooses or least_kept_bytes(problem) > counted_limit:
            return None
        planned = self.ask(replace(problem, memory_limit_bytes=None, host_limit_bytes=None))
        is_near = evaluate_decision(planned.problem, planned.decision).limit_bytes <= counted_limit
        if not is_near or max(self.needed(problem, planned.plan)) > limit:
            return None
        return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))

    def within(self, problem: Problem, least: _Least | None = None) -> Planned | None:
        """Asks under the limit, and again under one that is smaller by what the answer would hold too much.

        Args:
            problem: has the limit.
            least: the plan that holds the least, if it is known: at first the planner may count as
                much as for that.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        # The planner counts by a closed form, which may be above what the lists hold.
        counted = (
            evaluate_decision(least.problem, least.floor.decision).limit_bytes if least else limit
        )
        asked, before = max(limit, counted), None
        for _ in range(ASKING.attempts):
            try:
                planned = self.ask(replace(problem, memory_limit_bytes=asked))
            except Infeasible:
                return None
            # Asked for less, it answers the same: it would do so for ever.
            if planned.plan == before:
                return None
            over = max(self.needed(problem, planned.plan)) - limit
            if over <= 0:
                return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
            asked, before = max(asked - over, 1), planned.plan
        return None

    def least(self, problem: Problem, limit: int) -> _Least:
        """Finds the plan that holds the least, if it keeps the limit; of unlike devices in the best of their orders.

        Args:
            problem: what the planner is asked.
            limit: of the roomiest device.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit, but would one that is named.
        """
        if problem.schedule == AUTO:
            # Where the order is open, the one that holds the least runs micro-batches one by one.
            lists = one_by_one(ONE_F_ONE_B).tasks(problem.devices, problem.microbatches)
            problem = replace(problem, schedule=given_lists(lines_of(lists)))
        by_room: dict[tuple[int, ...], Problem] = {}
        for one in [problem] if self.fixed else orders(problem):
            by_room.setdefault(tuple(group.less_bytes for group in one.groups), one)
        floors = list[_Least]()
        # Orders that differ in slowness alone hold the same bytes, so one of each is looked at.
        for one in by_room.values():
            floors.append(_Least(self.floor(one, limit), one))
            if floors[-1].floor.bytes <= limit:
                return floors[-1]
        raise self._refusal(min(floors, key=lambda x: x.floor.bytes), limit)

    def floor(self, problem: Problem, limit: int) -> Floor:
        """Finds the plan that holds the least, or the first that keeps a limit."""

        def needed_bytes(decision: Decision) -> Sequence[int]:
            plan = answered(self.planner, problem, decision, self.places).plan
            return self.needed(problem, plan)

        keeps = find_planner(self.planner).fate_rule is FateRule.KEEPS
        return floor(problem, needed_bytes, limit, keeps=keeps)

    def _refusal(self, least: _Least, limit: int) -> MemoryLimitExceeded:
        """Says that no plan keeps the limit, and which limit would do."""
        problem, stage, enough = least.problem, least.floor.stage, least.floor.bytes
        if not any(group.less_bytes for group in problem.groups):
            return MemoryLimitExceeded(
                f"no plan of {self.planner} keeps the limit of {limit:,} bytes per device: stage {stage} would "
                f"hold the most. A limit of {enough:,} bytes would do; so may more stages or more micro-batches",
                enough,
            )
        less = {group.devices: group.less_bytes for group in problem.groups}
        stage_limit = limit - less[problem.where[stage]]
        same = tuple(replace(group, less_bytes=0, slowness=()) for group in problem.groups)
        # The limit that would do is one for all devices, as if they were alike.
        alike = self.floor(replace(problem, groups=same), 0).bytes
        return MemoryLimitExceeded(
            f"no plan of {self.planner} keeps the limits of the devices: at best {problem.name_of(stage)}, which "
            f"may hold {stage_limit:,} bytes, would hold {enough - limit:,} more. {alike:,} bytes "
            f"for each would do; so may "
            "more stages or more micro-batches",
            alike,
        )


def decide(
    planner: str,
    problem: Problem,
    places: tuple[int, ...],
    held_bytes_of: HeldBytes,
    *,
    fixed: bool,
) -> Planned:
    """Asks the planner; whether a limit can be kept is decided on bytes alone, so that it is always decided alike.

    A limit is kept if the plan that holds the least keeps it. Where the planner finds nothing that
    does, as its seconds are on that day, that plan is taken.

    Args:
        planner: its name.
        problem: what it is asked.
        places: the device of each stage.
        held_bytes_of: what the device of each stage of a plan holds at most, by the lowered lists.
        fixed: unlike devices stay in the order that they have.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit; the one that holds the least would keep the
            limit that it names.
    """
    limit, chosen = problem.memory_limit_bytes, find_planner(planner)
    asker = _Asker(planner, places, fixed, held_bytes_of)
    if limit is None or not chosen.asks_seconds:
        return asker.ask(problem)
    # Other orders than 1F1B may hold less than what is counted here.
    is_open = problem.schedule == AUTO
    is_roomy = is_open or ASKING.counted_times * least_kept_bytes(problem) <= limit
    # The plan that holds the least is dear to find, so a roomy problem is asked first.
    least = None if is_roomy else asker.least(problem, limit)
    planned = asker.unlimited(problem) or asker.within(problem, least)
    if planned is None and least is None:
        least = asker.least(problem, limit)
        planned = asker.within(problem, least)
    if planned is not None:
        return planned
    assert least is not None
    if chosen.as_paper:
        message = "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is taken"
        _log.warning(message, planner, limit)
    return answered(planner, least.problem, least.floor.decision, places)


def planned_again(
    planned: Planned,
    slowness: Sequence[Slowness],
    held_bytes_of: HeldBytes | None,
) -> Planned | None:
    """Plans again for devices that have become slower: cuts and fates, under the limits and over the links.

    Args:
        planned: what was planned for the devices as they were.
        slowness: how many times longer than then the device of each stage takes for each layer.
        held_bytes_of: what the device of each stage of a plan holds at most, if that is known.

    Returns:
        None if nothing keeps the limits, and if the planner is not asked again: it does as its
            paper says, or
        has sought an order of tasks, or stages have several devices.
    """
    problem, planner = planned.problem, find_planner(planned.plan.planner)
    if planner.as_paper or planned.ordered is not None or problem.replicated:
        return None
    # If stages share a device, the first of them tells which device it is.
    first = [problem.places.index(place) for place in range(problem.devices)]
    devices = [planned.plan.stages[s].devices[0] for s in first]
    names = [group.name for group in problem.groups]
    limits = [problem.limit_of(place) for place in range(problem.devices)]
    reported = [limit for limit in limits if limit is not None]
    problem = problem.told_apart([slowness[s] for s in first], reported, names, devices)
    places = tuple(devices[place] for place in problem.places)
    if reported and held_bytes_of is not None:
        return _Asker(planner.name, places, True, held_bytes_of).within(problem)
    try:
        return ask(planner.name, problem, places, fixed=True)
    except Infeasible:
        return None
