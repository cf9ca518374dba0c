"""Asks planners for a plan, until one keeps the memory limit when its bytes are counted exactly.

A planner estimates a run's bytes by closed formulas. Its answer is therefore lowered to the rows of
a run (programs and copies), whose bytes are exact. If these exceed the limit, the planner is asked
again under a smaller limit. Whether any plan keeps the limit is decided by bytes only, so measured
seconds, which vary, do not change the answer. `ASKING` says how long the search goes on.
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
from jvpipe.planners.model.stage_cost import Evaluation, evaluate_decision
from jvpipe.planners.order_reasons import order_reasons, search_reasons, update_reasons
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, GivenLists, given_lists, lines_of
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

_log = logging.getLogger("jvpipe")
Slowness = tuple[float, ...]
"""For each layer, how many times longer than the first device another device takes; empty if both
are equally fast."""
HeldBytes = Callable[[Plan], Sequence[int]]
"""Returns, for each stage of a plan, the peak bytes of its fullest device. They are counted in the
lowered rows, so they equal those of a run."""


@dataclass(frozen=True)
class AskingEffort:
    """How long the search goes on for a plan whose run keeps a memory limit.

    Attributes:
        attempts: how often a planner is asked at most. The limit that it sees is lowered each time
            by the bytes that a run of its last plan holds above the true limit.
        signings: how often a planner is asked at most until a plan, as compiled by the hardware's
            compiler, keeps the limit.
        counted_times: the largest expected ratio of a planner's estimate to the bytes of a run. If
            the estimate for a plan is more than this many times the limit, the plan is not lowered.
        noticed: a plan with optimizer state on the host is tried only if the limit makes steps
            longer by more than this share.
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
    """A plan, with the problem that it solves and the planner's decision.

    `ordered` is the result of the search for an order of tasks, if there was one. `shapes` has the
    best rough plan of each kind of shape, if the planner decided how many devices stages have.
    """

    plan: Plan
    problem: Problem
    decision: Decision
    ordered: OrderedPlan | None = None
    shapes: Mapping[str, RoughPlan] = field(default_factory=dict)

    @property
    def layer_s(self) -> list[float] | None:
        """Each layer's seconds, forward and backward, on the device that was measured, if any."""
        seconds = work_s(self.problem.costs.layers)
        return seconds if any(seconds) else None

    @property
    def evaluation(self) -> Evaluation:
        """The seconds and bytes of the decision."""
        return evaluate_decision(self.problem, self.decision)

    @property
    def step_s(self) -> float:
        """The seconds of a simulated step."""
        return simulated_step_s(self.problem, self.evaluation.stages)

    def reasons(self, cross_layer: Sequence[str]) -> list[str]:
        """Says how devices differ, why each cut is where it is, and what the order of tasks gains.

        Args:
            cross_layer: names of the optimizer's transformations that need a value of all layers.
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
        """The costs of each layer on the device where the plan puts it."""
        stages = enumerate(pairwise(self.decision.bounds))
        return [layer for s, (i, j) in stages for layer in self.problem.layers_on(s)[i:j]]

    @property
    def recompute_s(self) -> float:
        """The seconds per step, summed over devices, for recomputing or swapping values."""
        chosen = zip(self.placed, self.decision.choices, strict=True)
        return self.problem.microbatches * sum(
            layer.options[c].extra_s for layer, c in chosen if c >= 0
        )


def ask(
    planner: str, problem: Problem, places: Sequence[int] | None = None, *, fixed: bool = False
) -> Planned:
    """Asks a planner for a plan, including the order of tasks if the problem leaves it open.

    jvpipe's own planner also chooses in which order stages take devices that differ from each other
    in speed or memory ("unlike" devices).

    Args:
        planner: the name of the planner.
        problem: the problem to solve; the problem in the answer has the order that was chosen.
        places: the device of each stage; if the order of tasks is open, the device of each place.
            Unless given, 0, 1, 2 and so on. Not used for unlike devices: the problem has their
            numbers.
        fixed: keep unlike devices in the order that they have.

    Raises:
        Infeasible: the planner finds no plan that keeps the limit.
    """
    unlike = problem.groups and not problem.replicated
    # The papers' planners take unlike devices in the order in which they are given.
    chooses = unlike and not find_planner(planner).as_paper and not fixed
    asked = worth_searching(problem) if chooses else [problem]
    return least_of(asked, lambda one: _ask(planner, one, places), lambda planned: planned.step_s)


def _ask(planner: str, problem: Problem, places: Sequence[int] | None) -> Planned:
    """Asks a planner with the devices in the order of the problem."""
    if problem.schedule != AUTO:
        return answered(planner, problem, find_planner(planner).decide(problem), places)
    ordered = find_order(problem)
    plan = ordered.plan(problem, planner)
    # If devices are unlike, the problem's groups have their numbers.
    if places and not problem.groups:
        plan = plan.on([(places[d],) for stage in plan.stages for d in stage.devices])
    return Planned(plan, ordered.answered(problem), ordered.decision, ordered)


def answered(
    planner: str,
    problem: Problem,
    decision: Decision,
    places: Sequence[int] | None = None,
) -> Planned:
    """Makes a plan of a planner's decision.

    Args:
        planner: the name of the planner.
        problem: the problem that it has solved.
        decision: its decision.
        places: the device of each stage; unless given, as the problem has them.
    """
    # Task lists that a search has found are kept in the plan, since no schedule can make them.
    lists = problem.schedule.lists
    where = None if problem.groups or places is None else [(place,) for place in places]
    plan = decision.plan(problem, planner, where)
    plan = replace(plan, tasks=lists.lines) if isinstance(lists, GivenLists) else plan
    return Planned(plan, problem, decision)


def ask_shapes(planner: str, shapes: Shapes) -> Planned:
    """Asks a planner that also decides each stage's devices and the examples of a micro-batch.

    Args:
        planner: the name of the planner.
        shapes: the shapes to choose from.

    Raises:
        Infeasible: no plan keeps the limits; the error has a limit that some plan keeps.
        ValueError: the user gives a part of the shape that this planner decides itself, or the
            planner cannot use so many devices.
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
            # Several shapes may differ only in which devices a stage has: the first one is kept.
            worth.setdefault((plan.shape.replicas, plan.shape.size), plan)
        some = _worth_plans(list(worth.values()))
        best = least_of(some, lambda plan: _of_shape(planner, plan), lambda one: one.step_s)
    return replace(best, shapes=of_each_kind(plans))


def _worth_plans(plans: Sequence[RoughPlan]) -> Sequence[RoughPlan]:
    """Returns the rough plans, given the best first, whose shapes are worth an exact plan.

    A rough plan keeps or recomputes all values of a stage. If the first one recomputes,
    much slower shapes are returned too, because the fates of single values may save much
    time. Otherwise an exact plan can only have better cuts, which save little, so much
    slower shapes are left out. At most `SHAPE.planned` plans are returned.
    """
    first = plans[0]
    most_s = SHAPE.worth_a_plan * first.step_s
    again = any(choice < 0 for choice in first.decision.choices)
    return [x for x in plans[: SHAPE.planned] if again or x.step_s <= most_s]


def _of_shape(planner: str, plan: RoughPlan) -> Planned:
    """Returns the best exact plan that is found with the shape of a rough plan."""
    problem = plan.problem
    if problem.schedule == AUTO:
        return _ask(planner, problem, None)
    # The search begins with the rough plan if that plan keeps the limit and has the
    # problem's number of stages. What the search finds is then at least as fast.
    fits = plan.evaluation.limit_bytes <= (problem.memory_limit_bytes or math.inf)
    begin = [plan.decision] if fits and len(plan.decision.bounds) == problem.stages + 1 else []
    return answered(planner, problem, under_rule(problem, begin))


def _of_paper(planner: Planner, shapes: Shapes) -> list[RoughPlan]:
    """Returns a paper's plans, one for each usable size of micro-batches, the fastest first."""
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
    """Makes the error of a paper's planner that finds no plan; it names a limit that suffices."""
    limit = shapes.model.memory_limit_bytes
    assert limit is not None, "without a limit every planner has a plan"

    def finds(limit_bytes: int) -> bool:
        return bool(_of_paper(planner, shapes.under(limit_bytes)))

    enough = max(limit + 1, least_bytes_plans(shapes)[0].evaluation.limit_bytes)
    # The loop ends, because every planner has a plan once the limit is large enough.
    while not finds(enough):
        enough += enough // 8 + 1
    return Infeasible(
        f"{planner.name} has no plan that fits into {limit} bytes per device: with {enough} bytes, "
        f"{enough - limit} more, it has one. Use more devices, or planner 'jvpipe'",
        stage=0,
        excess_bytes=enough - limit,
        smallest_limit_bytes=enough,
    )


class _Least(NamedTuple):
    """The plan that holds the fewest bytes, and the problem with that plan's order of devices."""

    floor: Floor
    problem: Problem


@dataclass(frozen=True)
class _Asker:
    """A planner that is asked until a run of its answer keeps a limit.

    All devices are compared with one limit, that of the device with the most memory. If another
    device may hold x bytes less, x is added to the bytes that this device holds. The sum is then
    within the one limit if and only if the device keeps its own.

    Args:
        planner: the name of the planner.
        places: the device of each stage.
        fixed: unlike devices stay in the order that they have.
        held_bytes_of: returns the bytes of each stage's fullest device, from the lowered rows.
    """

    planner: str
    places: tuple[int, ...]
    fixed: bool
    held_bytes_of: HeldBytes

    def ask(self, problem: Problem) -> Planned:
        """Asks the planner once."""
        return ask(self.planner, problem, self.places, fixed=self.fixed)

    def needed(self, problem: Problem, plan: Plan) -> list[int]:
        """Returns how large the largest device's limit must be to fit each stage of a plan.

        Args:
            problem: says by how many bytes the limits of the other devices are smaller.
            plan: the plan.
        """
        # A plan may have its stages in another order than the problem, so devices identify a stage.
        less = {group.devices: group.less_bytes for group in problem.groups}
        stage_sizes = zip(self.held_bytes_of(plan), plan.stages, strict=True)
        return [size + less.get(stage.devices, 0) for size, stage in stage_sizes]

    def unlimited(self, problem: Problem) -> Planned | None:
        """Asks for a plan as if there were no limit, if the planner chooses fates.

        Returns:
            The plan; None if it exceeds the limit, or if the planner does not choose fates.
        """
        # The lowered rows decide whether the plan keeps the limit. The planner's estimate may be
        # well above the bytes of the rows, but hardly below. So the plan is lowered unless its
        # estimate is more than `counted_times` the limit.
        limit = problem.memory_limit_bytes
        assert limit is not None
        counted_limit = ASKING.counted_times * limit
        chooses = find_planner(self.planner).chooses_fates
        if not chooses or least_kept_bytes(problem) > counted_limit:
            return None
        planned = self.ask(replace(problem, memory_limit_bytes=None, host_limit_bytes=None))
        is_near = planned.evaluation.limit_bytes <= counted_limit
        if not is_near or max(self.needed(problem, planned.plan)) > limit:
            return None
        return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))

    def within(self, problem: Problem, least: _Least | None = None) -> Planned | None:
        """Asks under the limit, and again under smaller ones until a run of the answer keeps it.

        Args:
            problem: has the limit.
            least: the plan that holds the fewest bytes, if it is known. The first limit is at least
                the planner's estimate for this plan, so that the planner can find it.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        # The planner may estimate more bytes for `least` than the rows of `least` hold. The planner
        # would then refuse a limit that `least` keeps.
        counted = (
            evaluate_decision(least.problem, least.floor.decision).limit_bytes if least else limit
        )
        asked, before = max(limit, counted), None
        for _ in range(ASKING.attempts):
            try:
                planned = self.ask(replace(problem, memory_limit_bytes=asked))
            except Infeasible:
                return None
            # If a smaller limit has not changed the plan, even smaller ones are not tried.
            if planned.plan == before:
                return None
            over = max(self.needed(problem, planned.plan)) - limit
            if over <= 0:
                return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
            asked, before = max(asked - over, 1), planned.plan
        return None

    def least(self, problem: Problem, limit: int) -> _Least:
        """Finds the plan that holds the fewest bytes, in the best order of unlike devices.

        Args:
            problem: the problem that the planner is asked.
            limit: the limit of the device with the most memory.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; the error names a limit that one keeps.
        """
        if problem.schedule == AUTO:
            # If the order of tasks is open, a step that runs one micro-batch after another holds
            # the fewest bytes, because no stage then has two micro-batches in flight.
            lists = one_by_one(ONE_F_ONE_B).tasks(problem.devices, problem.microbatches)
            problem = replace(problem, schedule=given_lists(lines_of(lists)))
        # What plans hold does not depend on the speed of devices. So of the orders of devices that
        # have the same limits in the same places, only one is tried.
        by_room: dict[tuple[int, ...], Problem] = {}
        for one in [problem] if self.fixed else orders(problem):
            by_room.setdefault(tuple(group.less_bytes for group in one.groups), one)
        floors = list[_Least]()
        for one in by_room.values():
            floors.append(_Least(self.floor(one, limit), one))
            if floors[-1].floor.bytes <= limit:
                return floors[-1]
        raise self._refusal(min(floors, key=lambda x: x.floor.bytes), limit)

    def floor(self, problem: Problem, limit: int) -> Floor:
        """Finds the plan that holds the fewest bytes, or the first plan that keeps a limit.

        Args:
            problem: has the devices in the order in which the plan is to use them.
            limit: the limit of the device with the most memory.
        """

        def needed_bytes(decision: Decision) -> Sequence[int]:
            plan = answered(self.planner, problem, decision, self.places).plan
            return self.needed(problem, plan)

        keeps = find_planner(self.planner).fate_rule is FateRule.KEEPS
        return floor(problem, needed_bytes, limit, keeps=keeps)

    def _refusal(self, least: _Least, limit: int) -> MemoryLimitExceeded:
        """Makes the error that no plan keeps the limit, with a limit that a plan would keep."""
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
        # The message names one limit for all devices, so they are taken to be equal here.
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
    """Asks the planner for a plan, and falls back to the plan that holds the fewest bytes.

    A limit can be kept if the plan that holds the fewest bytes keeps it. This depends on bytes
    only, so every run decides it in the same way. The planner's search also depends on measured
    seconds, and may find no plan although one exists. The plan with the fewest bytes is then taken.

    Args:
        planner: the name of the planner.
        problem: the problem that it is asked.
        places: the device of each stage.
        held_bytes_of: returns the bytes of each stage's fullest device, from the lowered rows.
        fixed: unlike devices stay in the order that they have.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit; the error names a limit that one keeps.
    """
    limit, chosen = problem.memory_limit_bytes, find_planner(planner)
    asker = _Asker(planner, places, fixed, held_bytes_of)
    if limit is None or not chosen.asks_seconds:
        return asker.ask(problem)
    # If the order of tasks is open, `least_kept_bytes` counts 1F1B; another order may hold less.
    is_open = problem.schedule == AUTO
    is_roomy = is_open or ASKING.counted_times * least_kept_bytes(problem) <= limit
    # The plan with the fewest bytes takes long to find. It is not needed if the limit is wide.
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
    """Plans cuts and fates again for devices that have become slower, under the same limits.

    Args:
        planned: the plan for the devices as they were.
        slowness: for each stage, how many times longer than before its device takes per layer.
        held_bytes_of: returns the bytes of each stage's fullest device; None if they are unknown.

    Returns:
        None if no plan keeps the limits. None also if the planner is not asked again, because it is
        a paper's, or a search has chosen the order of tasks, or stages have several devices.
    """
    problem, planner = planned.problem, find_planner(planned.plan.planner)
    if planner.as_paper or planned.ordered is not None or problem.replicated:
        return None
    each = range(problem.devices)
    # The number of a device is read from the first of its stages.
    first = list(map(problem.places.index, each))
    devices = [planned.plan.stages[s].devices[0] for s in first]
    names = [group.name for group in problem.groups]
    reported = [limit for place in each if (limit := problem.limit_of(place)) is not None]
    problem = problem.told_apart([slowness[s] for s in first], reported, names, devices)
    places = tuple(devices[place] for place in problem.places)
    if reported and held_bytes_of is not None:
        return _Asker(planner.name, places, True, held_bytes_of).within(problem)
    try:
        return ask(planner.name, problem, places, fixed=True)
    except Infeasible:
        return None
