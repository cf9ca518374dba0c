"""From a measured model to its plan: the planner is asked until a limit is kept."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import FateRule, find_planner
from jvpipe.planners.joint.device_orders import orders
from jvpipe.planners.joint.floor import Floor, floor
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, given_lists, lines_of
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.session.asking import HeldBytes, Planned, answered, ask
from jvpipe.session.devices import LIMITS
from jvpipe.session.measuring import Slowness
from jvpipe.session.settings import Settings

_log = logging.getLogger("jvpipe")


class _Least(NamedTuple):
    """The plan that holds the least, and the order of devices that it is for."""

    floor: Floor
    problem: Problem


@dataclass(frozen=True)
class _Asker:
    """A planner that is asked until its answer keeps a limit, by the bytes that a run of it would hold.

    Limits are those of the roomiest device. A device that may hold less by some bytes counts as if it held these too,
    so that one number says whether a plan keeps all limits.

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
        """Asks a planner that chooses fates without a limit; returns the plan if the lists say that it keeps the limit.

        It may keep it even if the planner, whose count is near what the lists hold and never much below it, counts
        more.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        counted_limit = LIMITS.counted_times * limit
        chooses = find_planner(self.planner).chooses_fates
        if not chooses or least_kept_bytes(problem) > counted_limit:
            return None
        planned = self.ask(replace(problem, memory_limit_bytes=None, host_limit_bytes=None))
        is_near = evaluate(planned.problem, planned.decision).limit_bytes <= counted_limit
        if not is_near or max(self.needed(problem, planned.plan)) > limit:
            return None
        return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))

    def within(self, problem: Problem, least: _Least | None = None) -> Planned | None:
        """Asks under the limit, and again under one that is smaller by what the answer would hold too much.

        Args:
            problem: has the limit.
            least: the plan that holds the least, if it is known: at first the planner may count as much as for that.
        """
        limit = problem.memory_limit_bytes
        assert limit is not None
        # The planner counts by a closed form, which may be above what the lists hold.
        counted = evaluate(least.problem, least.floor.decision).limit_bytes if least else limit
        asked, before = max(limit, counted), None
        for _ in range(LIMITS.attempts):
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
    settings: Settings,
    places: tuple[int, ...],
    problem: Problem,
    held_bytes_of: HeldBytes,
) -> Planned:
    """Asks the planner; whether a limit can be kept is decided on bytes alone, so that it is always decided alike.

    A limit is kept if the plan that holds the least keeps it. Where the planner finds nothing that does, as its seconds
    are on that day, that plan is taken.

    Args:
        settings: what is wanted.
        places: the device of each stage.
        problem: what the planner is asked.
        held_bytes_of: what the device of each stage of a plan holds at most, by the lowered lists.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit; the one that holds the least would keep the limit that it names.
    """
    limit, planner = problem.memory_limit_bytes, find_planner(settings.planner)
    asker = _Asker(planner.name, places, settings.hosts is not None, held_bytes_of)
    if limit is None or not planner.asks_seconds:
        return asker.ask(problem)
    # Other orders than 1F1B may hold less than what is counted here.
    is_open = settings.schedule == AUTO
    is_roomy = is_open or LIMITS.counted_times * least_kept_bytes(problem) <= limit
    # The plan that holds the least is dear to find, so a roomy problem is asked first.
    least = None if is_roomy else asker.least(problem, limit)
    planned = asker.unlimited(problem) or asker.within(problem, least)
    if planned is None and least is None:
        least = asker.least(problem, limit)
        planned = asker.within(problem, least)
    if planned is not None:
        return planned
    assert least is not None
    if planner.as_paper:
        message = "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is taken"
        _log.warning(message, planner.name, limit)
    return answered(planner.name, least.problem, least.floor.decision, places)


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
        None if nothing keeps the limits, and if the planner is not asked again: it does as its paper says, or
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
