"""From a measured model to its plan: the planner is asked until a limit is kept."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from jvpipe.session.asking import Planned, answered, ask
from jvpipe.session.measuring import LIMITS, Request

_log = logging.getLogger("jvpipe")


def decide(
    request: Request, problem: Problem, held_bytes_of: Callable[[Plan], Sequence[int]]
) -> Planned:
    """Asks the planner; whether a limit can be kept is decided on bytes alone, so that it is always decided alike.

    A limit is kept if the plan that holds the least keeps it. Where the planner finds nothing that does, as its seconds
    are on that day, that plan is taken.

    Args:
        request: what is wanted.
        problem: what the planner is asked.
        held_bytes_of: what the device of each stage of a plan holds at most, by the lowered lists.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit; the one that holds the least would keep the limit that it names.
    """
    limit, planner = problem.memory_limit_bytes, find_planner(request.planner)
    if limit is None or not planner.asks_seconds:
        return ask(request.planner, problem, request.places, fixed=request.fixed)
    needed_of = _needed_of(problem, held_bytes_of)
    roomy = (
        request.schedule == AUTO or LIMITS.counted_times * least_kept_bytes(problem) <= limit
    )  # others may hold less than 1F1B
    least = None if roomy else _least(request, problem, limit, needed_of)
    planned = _unlimited(request, problem, needed_of) or _within(request, problem, least, needed_of)
    if planned is None and least is None:
        least = _least(request, problem, limit, needed_of)
        planned = _within(request, problem, least, needed_of)
    if planned is None:
        assert least is not None
        planned = answered(request.planner, least.problem, least.floor.decision, request.places)
        if find_planner(request.planner).as_paper:
            told = "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is taken"
            _log.warning(told, request.planner, limit)
    return planned


def planned_again(
    planned: Planned,
    slowness: Sequence[tuple[float, ...]],
    held_bytes_of: Callable[[Plan], Sequence[int]] | None,
) -> Planned | None:
    """The whole plan for devices that have become slower: cuts and fates, under the limits and over the links.

    Args:
        planned: what was planned for the devices as they were.
        slowness: how many times longer than then the device of each stage takes for each layer.
        held_bytes_of: what the device of each stage of a plan holds at most, if that is known.

    Returns:
        None if nothing keeps the limits; and where the planner is not asked again: it does as its paper says, or
        has sought an order of tasks, or stages have several devices.
    """
    problem, planner = planned.problem, find_planner(planned.plan.planner)
    if planner.as_paper or planned.ordered is not None or problem.replicated:
        return None
    first = [problem.places.index(place) for place in range(problem.devices)]
    devices = [planned.plan.stages[s].devices[0] for s in first]
    names = [group.name for group in problem.groups]
    limits = [problem.limit_of(place) for place in range(problem.devices)]
    known = [limit for limit in limits if limit is not None]
    problem = problem.told_apart([slowness[s] for s in first], known, names, devices)
    places = tuple(devices[place] for place in problem.places)
    request = Request(
        planner.name, problem.stages, problem.schedule, problem.microbatches, places, fixed=True
    )
    if not known or held_bytes_of is None:
        try:
            return ask(planner.name, problem, places, fixed=True)
        except Infeasible:
            return None
    needed_of = _needed_of(problem, held_bytes_of)
    return _within(request, problem, None, needed_of)


def _needed_of(
    problem: Problem, held_bytes_of: Callable[[Plan], Sequence[int]]
) -> Callable[[Plan], Sequence[int]]:
    """Makes what tells the limit, of the roomiest device, that each stage of a plan needs.

    Args:
        problem: says how much less room other devices have.
        held_bytes_of: what the device of each stage holds at most.
    """
    less = {group.devices: group.less_bytes for group in problem.groups}

    def needed_of(plan: Plan) -> Sequence[int]:
        held = zip(held_bytes_of(plan), plan.stages, strict=True)
        return [size + less.get(stage.devices, 0) for size, stage in held]

    return needed_of


class _Least(NamedTuple):
    """The plan that holds the least, and the order of devices that it is for."""

    floor: Floor
    problem: Problem


def _least(
    request: Request, problem: Problem, limit: int, needed_of: Callable[[Plan], Sequence[int]]
) -> _Least:
    """The plan that holds the least, if it keeps the limit; of unlike devices in the best of their orders."""
    problem = _with_fewest_in_flight(problem)
    every = [problem] if request.fixed else orders(problem)
    by_room: dict[tuple[int, ...], Problem] = {}
    for one in every:
        by_room.setdefault(tuple(each.less_bytes for each in one.groups), one)
    floors = list[_Least]()
    for one in by_room.values():
        floors.append(_Least(_floor(request, one, limit, needed_of), one))
        if floors[-1].floor.bytes <= limit:
            return floors[-1]
    least = min(floors, key=lambda x: x.floor.bytes)
    stage, enough = least.floor.stage, least.floor.bytes
    if not any(group.less_bytes for group in problem.groups):
        raise MemoryLimitExceeded(
            f"no plan of {request.planner} keeps the limit of {limit:,} bytes per device: stage {stage} would "
            f"hold the most. A limit of {enough:,} bytes would do; so may more stages or more micro-batches",
            enough,
        )
    less = {each.devices: each.less_bytes for each in problem.groups}
    own = limit - less[least.problem.where[stage]]
    same = tuple(replace(group, less_bytes=0, slowness=()) for group in problem.groups)
    alike = _floor(
        request,
        replace(problem, groups=same),
        0,
        lambda plan: _without(less, needed_of(plan), plan),
    )
    raise MemoryLimitExceeded(
        f"no plan of {request.planner} keeps the limits of the devices: at best {least.problem.name_of(stage)}, which "
        f"may hold {own:,} bytes, would hold {enough - limit:,} more. {alike.bytes:,} bytes for each would do; so may "
        "more stages or more micro-batches",
        alike.bytes,
    )


def _with_fewest_in_flight(problem: Problem) -> Problem:
    """The problem with the order that holds the least, where the order is open: it runs micro-batches one by one."""
    if problem.schedule != AUTO:
        return problem
    lists = one_by_one(ONE_F_ONE_B).tasks(problem.devices, problem.microbatches)
    return replace(problem, schedule=given_lists(lines_of(lists)))


def _floor(
    request: Request, problem: Problem, limit: int, needed_of: Callable[[Plan], Sequence[int]]
) -> Floor:
    def needed_bytes(decision: Decision) -> Sequence[int]:
        return needed_of(answered(request.planner, problem, decision, request.places).plan)

    return floor(
        problem,
        needed_bytes,
        limit,
        keeps=find_planner(request.planner).fate_rule is FateRule.KEEPS,
    )


def _without(less: Mapping[tuple[int, ...], int], needed: Sequence[int], plan: Plan) -> list[int]:
    """What devices hold, of what limits they need if some may hold less than others."""
    return [size - less[stage.devices] for size, stage in zip(needed, plan.stages, strict=True)]


def _unlimited(
    request: Request, problem: Problem, needed_of: Callable[[Plan], Sequence[int]]
) -> Planned | None:
    """The plan of no limit, for a planner that chooses fates, if the lists say that it keeps the limit.

    It may keep it even if the planner, whose count is near what the lists hold and never much below it, counts more.
    """
    limit, free = (
        problem.memory_limit_bytes,
        replace(problem, memory_limit_bytes=None, host_limit_bytes=None),
    )
    assert limit is not None
    if not request.chooses or least_kept_bytes(problem) > LIMITS.counted_times * limit:
        return None
    planned = ask(request.planner, free, request.places, fixed=request.fixed)
    near = evaluate(planned.problem, planned.decision).limit_bytes <= LIMITS.counted_times * limit
    planned = replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
    return planned if near and max(needed_of(planned.plan)) <= limit else None


def _within(
    request: Request,
    problem: Problem,
    least: _Least | None,
    needed_of: Callable[[Plan], Sequence[int]],
) -> Planned | None:
    """The planner's plan under the limit; should the lists hold more than it counts, under a limit smaller by as much.

    At first the planner may count as much as it does for the plan that holds the least.
    """
    limit = problem.memory_limit_bytes
    assert limit is not None
    counted = evaluate(least.problem, least.floor.decision).limit_bytes if least else limit
    asked, before = replace(problem, memory_limit_bytes=max(limit, counted)), None
    for _ in range(LIMITS.attempts):
        try:
            planned = ask(request.planner, asked, request.places, fixed=request.fixed)
        except Infeasible:
            return None
        if planned.plan == before:
            return None
        over = max(needed_of(planned.plan)) - limit
        if over <= 0:
            return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
        asked = replace(asked, memory_limit_bytes=max((asked.memory_limit_bytes or 0) - over, 1))
        before = planned.plan
    return None
