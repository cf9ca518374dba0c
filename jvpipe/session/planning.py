"""Asks planners for a plan, until one keeps the memory limit when its bytes are counted exactly.

A planner estimates a run's bytes by closed formulas. Its answer is therefore lowered to the rows of
a run (programs and copies), whose bytes are exact. If these bytes exceed the limit, the planner is
asked again under a smaller limit. Bytes alone decide whether any plan keeps the limit, so measured
seconds, which vary, do not change the answer. `ASKING` bounds the search.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jvpipe.cost.slowness import Slowness
from jvpipe.ir.plan import Plan
from jvpipe.papers.asking import answered, ask, ask_shapes
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.device_orders import orders
from jvpipe.planners.joint.floor import Floor, floor
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.planner import FateRule
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.shape_reasons import shape_reasons, shape_words
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, given_lists
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

_log = logging.getLogger("jvpipe")
HeldBytes = Callable[[Plan], Sequence[int]]
"""Returns, for each stage of a plan, the peak bytes of its fullest device. The bytes are counted in
the lowered rows, so they equal the bytes of a run."""


@dataclass(frozen=True)
class AskingEffort:
    """The bounds of the search for a plan whose run keeps a memory limit.

    Attributes:
        attempts: the most times that a planner is asked. Each time, the planner's limit is
            lowered by the excess of its last plan's run over the true limit.
        signings: the most times that a planner is asked until a plan, as compiled by the hardware's
            compiler, keeps the limit.
        counted_times: the largest expected ratio of a planner's estimate to the bytes of a
            run. If the estimate for a plan is more than this many times the limit, the plan
            is not lowered.
        noticed: a plan with optimizer state on the host is tried only if the limit makes
            steps longer by more than this share.
    """

    attempts: int = 5
    signings: int = 8
    counted_times: float = 1.2
    noticed: float = 0.01


ASKING = AskingEffort()


class _Least(NamedTuple):
    """The plan that holds the fewest bytes, and the problem with this plan's order of devices."""

    floor: Floor
    problem: Problem


@dataclass(frozen=True)
class _Asker:
    """A planner that is asked again until a run of its plan keeps the limit.

    All devices are compared with one limit, which is that of the device with the most memory. If a
    device's limit is x bytes smaller, x is added to the bytes that the device holds. The sum keeps
    the one limit if and only if the device keeps its own limit.

    Args:
        planner: the name of the planner.
        places: the device of each stage.
        fixed: whether devices that differ in speed or memory ("unlike" devices) keep their order.
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
        """Returns, for each stage, the smallest common limit under which the stage fits.

        Args:
            problem: gives the bytes by which the limits of the other devices are smaller.
            plan: the plan.
        """
        # The order of stages may differ between plan and problem, so devices identify a stage.
        less = {group.devices: group.less_bytes for group in problem.groups}
        stage_sizes = zip(self.held_bytes_of(plan), plan.stages, strict=True)
        return [size + less.get(stage.devices, 0) for size, stage in stage_sizes]

    def unlimited(self, problem: Problem) -> Planned | None:
        """Asks for a plan without a limit, if the planner chooses fates.

        Returns:
            The plan; None if it exceeds the limit, or if the planner does not choose fates.
        """
        # The lowered rows decide whether the plan keeps the limit. The planner's estimate may be
        # far above the bytes of the rows, but is rarely below. So the plan is lowered unless its
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
        """Asks under the limit, then under smaller limits until a run of the plan keeps the limit.

        Args:
            problem: has the limit.
            least: the plan that holds the fewest bytes, if it is known. The first limit is at
                least the planner's estimate for this plan, so that the planner can find it.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        # The planner may estimate more bytes for `least` than its rows hold, and then refuse a
        # limit that `least` keeps.
        counted = (
            evaluate_decision(least.problem, least.floor.decision).limit_bytes if least else limit
        )
        asked, before = max(limit, counted), None
        for _ in range(ASKING.attempts):
            try:
                planned = self.ask(replace(problem, memory_limit_bytes=asked))
            except Infeasible:
                return None
            # If a smaller limit has not changed the plan, the search ends.
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
            problem: the problem for the planner.
            limit: the limit of the device with the most memory.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; the error names a limit that one keeps.
        """
        if problem.schedule == AUTO:
            # If the planner may choose the order of tasks, running one micro-batch after another
            # holds the fewest bytes, because no stage then has two micro-batches in flight.
            lists = one_by_one(ONE_F_ONE_B).tasks(problem.devices, problem.microbatches)
            problem = replace(problem, schedule=given_lists(lists))
        # The bytes of plans do not depend on the speed of devices. So of several orders of devices
        # with the same sequence of limits, only one is tried.
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
            problem: has the devices in the order in which the plan must use them.
            limit: the limit of the device with the most memory.
        """

        def needed_bytes(decision: Decision) -> Sequence[int]:
            plan = answered(self.planner, problem, decision, self.places).plan
            return self.needed(problem, plan)

        keeps = find_planner(self.planner).fate_rule is FateRule.KEEPS
        return floor(problem, needed_bytes, limit, keeps=keeps)

    def _refusal(self, least: _Least, limit: int) -> MemoryLimitExceeded:
        """Returns the error for a limit that no plan keeps; it names a limit that a plan keeps."""
        problem, stage, enough = least.problem, least.floor.stage, least.floor.bytes
        less = {group.devices: group.less_bytes for group in problem.groups}
        if not any(less.values()):
            return MemoryLimitExceeded(
                f"no plan of {self.planner} keeps the limit of {limit:,} bytes per device: "
                f"stage {stage} would hold the most. A limit of {enough:,} bytes would do; "
                "so may more stages or more micro-batches",
                enough,
            )
        same = tuple(replace(group, less_bytes=0, slowness=()) for group in problem.groups)
        # The message names one limit for all devices, so all devices are treated as equal here.
        alike = self.floor(replace(problem, groups=same), 0).bytes
        return MemoryLimitExceeded(
            f"no plan of {self.planner} keeps the limits of the devices: at best "
            f"{problem.name_of(stage)}, which may hold {limit - less[problem.where[stage]]:,} "
            "bytes, would hold "
            f"{enough - limit:,} more. {alike:,} bytes for each would do; so may more "
            "stages or more micro-batches",
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

    A limit is possible if the plan that holds the fewest bytes keeps it. This test depends on bytes
    only, so it has the same result in every run. The planner's search also depends on measured
    seconds, and may miss a plan that exists. Then the plan with the fewest bytes is returned.

    Args:
        planner: the name of the planner.
        problem: the problem for the planner.
        places: the device of each stage.
        held_bytes_of: returns the bytes of each stage's fullest device, from the lowered rows.
        fixed: whether devices that differ in speed or memory ("unlike" devices) keep their order.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit; the error names a limit that one keeps.
    """
    limit, chosen = problem.memory_limit_bytes, find_planner(planner)
    asker = _Asker(planner, places, fixed, held_bytes_of)
    if limit is None or not chosen.asks_seconds:
        return asker.ask(problem)
    # Under schedule "auto", `least_kept_bytes` counts 1F1B, and another order may hold less.
    is_open = problem.schedule == AUTO
    is_roomy = is_open or ASKING.counted_times * least_kept_bytes(problem) <= limit
    # Finding the plan with the fewest bytes takes long, and is not needed under a large limit.
    least = None if is_roomy else asker.least(problem, limit)
    planned = asker.unlimited(problem) or asker.within(problem, least)
    if planned is not None:
        return planned
    if least is None:
        least = asker.least(problem, limit)
        if (planned := asker.within(problem, least)) is not None:
            return planned
    if chosen.as_paper:
        _log.warning(
            "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is "
            "taken",
            planner,
            limit,
        )
    return answered(planner, least.problem, least.floor.decision, places)


def planned_again(
    planned: Planned,
    slowness: Sequence[Slowness],
    held_bytes_of: HeldBytes | None,
) -> Planned | None:
    """Plans cuts and fates again for devices that have become slower, under the same limits.

    Args:
        planned: the plan for the devices as they were.
        slowness: for each stage, the ratio of its device's present to earlier seconds, by layer.
        held_bytes_of: returns the bytes of each stage's fullest device; None if they are unknown.

    Returns:
        None if no plan keeps the limits. Also None if the planner implements a paper, if a search
        chose the order of tasks, or if stages have several devices.
    """
    problem, planner = planned.problem, find_planner(planned.plan.planner)
    if planner.as_paper or planned.ordered is not None or problem.replicated:
        return None
    each = range(problem.devices)
    # A device's number is read from its first stage.
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


@dataclass(frozen=True)
class ChosenShape:
    """The number of places of a pipeline, and the reasons for it as lines of text.

    A place is one device, or several devices that are replicas of each other. `planned` is None
    unless a place has several devices.
    """

    places: int
    why: tuple[str, ...]
    planned: Planned | None = None


def decide_shape(planner: str, shapes: Shapes, held_bytes_of: HeldBytes) -> ChosenShape | str:
    """Asks the planner for shapes (which devices each stage has) until a run keeps the limit.

    Args:
        planner: the name of the planner.
        shapes: the shapes to choose from.
        held_bytes_of: returns the bytes of each stage's fullest device, from the lowered rows.

    Returns:
        The shape, or a text that explains why stages cannot have several devices.
    """
    asked = shapes
    for _ in range(ASKING.attempts):
        try:
            planned = ask_shapes(planner, asked)
        except Infeasible:
            break
        problem = planned.problem
        why = (
            f"on {shapes.devices} devices {shape_words(problem)}: "
            f"step {1e3 * planned.step_s:.2f} ms simulated",
            *shape_reasons(shapes, problem, planned.decision, planned.shapes),
        )
        if not problem.replicated:
            return ChosenShape(problem.devices, why)
        try:
            device_bytes = held_bytes_of(planned.plan)
        except ValueError as unlike:  # a layer has other residuals on slices of a micro-batch
            return str(unlike)
        limits = [problem.limit_of(place) or math.inf for place in problem.places]
        over = max(size - limit for size, limit in zip(device_bytes, limits, strict=True))
        if over <= 0:
            return ChosenShape(problem.devices, why, planned)
        # The planner's limit is lowered by the excess of this plan over the true limit.
        tighter = (asked.model.memory_limit_bytes or 0) - int(over)
        asked = asked.under(max(1, tighter))
    limit = shapes.model.memory_limit_bytes
    return f"no plan with replicas was found that keeps the limit of {limit} bytes"
