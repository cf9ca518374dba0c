"""From a traced model to its plan: what must be measured is measured, and the planner asked."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from jvpipe._jax import Device, is_own
from jvpipe.cost.archive import Archive
from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.lending import measured_lending
from jvpipe.cost.links import links_between
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.model import Work, costs_of
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import FateRule, find_planner
from jvpipe.planners.joint.device_orders import least_of, orders, worth_searching
from jvpipe.planners.joint.floor import Floor, floor
from jvpipe.planners.joint.order_search import OrderedPlan, find_order
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.model import forward_program, layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, GivenLists, given, lines_of, may_split
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.schedule import Schedule
from jvpipe.session.unlike import given_slowness, measured_slowness
from jvpipe.trace.graph import Traced

_ATTEMPTS = 5
_log = logging.getLogger("jvpipe")
_NEAR = 1.2
"""How many times what a plan holds a planner may count."""


@dataclass(frozen=True)
class Request:
    """A request for a plan; `places[s]` is the device of stage s.

    `limits` are what each device may hold (none: there is no limit), `speeds` how fast each is beside the others (none:
    what is measured tells). Unlike devices get stages in another order if that is better, unless they are `fixed`.
    """

    planner: str
    stages: int
    schedule: Schedule
    microbatches: int
    places: tuple[int, ...]
    limits: tuple[int, ...] = ()
    host_limit_bytes: int | None = None
    speeds: tuple[float, ...] = ()
    fixed: bool = False

    @property
    def chooses(self) -> bool:
        """True if fates are to be chosen: by a planner that does, under a limit."""
        return bool(self.limits) and find_planner(self.planner).fate_rule is FateRule.CHOOSES

    @property
    def splits(self) -> bool:
        """True if the schedule runs backwards in two halves, or may come to."""
        return may_split(self.schedule, self.stages // self.schedule.chunks, self.microbatches)


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was decided on; `ordered` what is known of an order that was searched for."""

    plan: Plan
    problem: Problem
    decision: Decision
    ordered: OrderedPlan | None = None

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


def measure(
    request: Request,
    traced: Traced,
    optimizer: OptimizerCut,
    store: ProgramStore,
    devices: Sequence[Device],
    known: Runs | None = None,
    room_bytes: int | None = None,
    archive: Archive | None = None,
    between_hosts: Link | None = None,
) -> Problem:
    """The planner's question: bytes always; seconds and links between devices if it asks for them; fates and links to
    the host if it chooses.

    Args:
        request: what is wanted of a plan.
        traced: the model.
        optimizer: in pieces.
        store: where programs are compiled.
        devices: there are; layers are measured on that of the first stage.
        known: what was measured of programs before and is not measured again; the others are added.
        room_bytes: that the device has for a program; what needs more is not run.
        archive: where seconds are found that earlier processes have measured, and others are kept.
        between_hosts: the link from the devices of one process to those of another, if there are several: it is the
            slowest, and counts for all.
    """
    first, *others = used = [devices[place] for place in dict.fromkeys(request.places)]
    others = [device for device in others if is_own(device)]
    links, slowness = None, None
    if not find_planner(request.planner).asks_seconds:
        signatures = [programs.signature for programs in layer_programs(store, traced)]
        costs: Costs = costs_of(
            traced.graph,
            signatures,
            [Work(0.0, 0.0)] * len(signatures),
            None,
            optimizer,
            request.microbatches,
        )
    else:
        timed = {"room_bytes": room_bytes, "archive": archive}
        wanted = {"fates": request.chooses, "split": request.splits, "known": known}
        costs = measured_costs(
            traced, first, store, optimizer, request.microbatches, **wanted, **timed
        )
        other_costs = partial(measured_costs, traced, store=store, fates=False, **timed)
        slowness = None if request.speeds else measured_slowness(used, other_costs, costs)
        links = (
            links_between(first, others[0] if others else None, archive)
            if others or request.chooses
            else None
        )
    lent = _lent(request, traced, store, used, costs, archive)
    problem = Problem(
        costs,
        request.stages,
        request.schedule,
        request.microbatches,
        host_limit_bytes=request.host_limit_bytes,
        host=links.host if links and request.chooses else INFINITE,
        peer=between_hosts or (links.send if links else INFINITE),
        peer_uses_host=links is not None and request.chooses and links.send_uses_host,
        lent=lent,
    )
    numbers = request.places[: problem.devices]
    if slowness is None:
        each = [given_slowness(request.speeds, numbers[0], d, len(costs.layers)) for d in numbers]
    else:
        each = [slowness[used.index(devices[d])] for d in numbers]
    limits, names = (
        [request.limits[d] for d in numbers if request.limits],
        [str(devices[d]) for d in numbers],
    )
    return problem.told_apart(each, limits, names, numbers)


def _lent(
    request: Request,
    traced: Traced,
    store: ProgramStore,
    devices: Sequence[Device],
    costs: Costs,
    archive: Archive | None,
) -> float:
    """Measures by the longest forward what idle devices lend, where an order of tasks is to be found."""
    if request.schedule != AUTO or not all(map(is_own, devices)):
        return 0.0
    longest = max(range(len(costs.layers)), key=lambda at: costs.layers[at].forward_s)
    return measured_lending(
        store,
        forward_program(layer_programs(store, traced)[longest], recompute=True),
        devices,
        archive,
    )


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
    less = {each.device: each.less_bytes for each in problem.traits}

    def needed_of(plan: Plan) -> Sequence[int]:
        held = zip(held_bytes_of(plan), plan.stages, strict=True)
        return [size + less.get(stage.devices[0], 0) for size, stage in held]

    roomy = (
        request.schedule == AUTO or _NEAR * least_kept_bytes(problem) <= limit
    )  # others may hold less than 1F1B
    least = None if roomy else _least(request, problem, limit, needed_of)
    planned = _unlimited(request, problem, needed_of) or _within(request, problem, least, needed_of)
    if planned is None and least is None:
        least = _least(request, problem, limit, needed_of)
        planned = _within(request, problem, least, needed_of)
    if planned is None:
        assert least is not None
        planned = _planned(request.planner, least.problem, least.floor.decision, request.places)
        if find_planner(request.planner).as_paper:
            told = "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is taken"
            _log.warning(told, request.planner, limit)
    return planned


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
        by_room.setdefault(tuple(each.less_bytes for each in one.traits), one)
    floors = list[_Least]()
    for one in by_room.values():
        floors.append(_Least(_floor(request, one, limit, needed_of), one))
        if floors[-1].floor.bytes <= limit:
            return floors[-1]
    least = min(floors, key=lambda x: x.floor.bytes)
    stage, enough = least.floor.stage, least.floor.bytes
    if not problem.traits:
        raise MemoryLimitExceeded(
            f"no plan of {request.planner} keeps the limit of {limit:,} bytes per device: stage {stage} would "
            f"hold the most. A limit of {enough:,} bytes would do; so may more stages or more micro-batches",
            enough,
        )
    less = {each.device: each.less_bytes for each in problem.traits}
    own = limit - less[least.problem.where[stage]]
    alike = _floor(
        request, replace(problem, traits=()), 0, lambda plan: _without(less, needed_of(plan), plan)
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
    return replace(problem, schedule=given(lines_of(lists)))


def _floor(
    request: Request, problem: Problem, limit: int, needed_of: Callable[[Plan], Sequence[int]]
) -> Floor:
    def needed_bytes(decision: Decision) -> Sequence[int]:
        return needed_of(_planned(request.planner, problem, decision, request.places).plan)

    return floor(
        problem,
        needed_bytes,
        limit,
        keeps=find_planner(request.planner).fate_rule is FateRule.KEEPS,
    )


def _without(less: Mapping[int, int], needed: Sequence[int], plan: Plan) -> list[int]:
    """What devices hold, of what limits they need if some may hold less than others."""
    return [size - less[stage.devices[0]] for size, stage in zip(needed, plan.stages, strict=True)]


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
    if not request.chooses or least_kept_bytes(problem) > _NEAR * limit:
        return None
    planned = ask(request.planner, free, request.places, fixed=request.fixed)
    near = evaluate(planned.problem, planned.decision).limit_bytes <= _NEAR * limit
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
    for _ in range(_ATTEMPTS):
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
    chooses = problem.traits and not find_planner(planner).as_paper and not fixed
    asked = worth_searching(problem) if chooses else [problem]
    return least_of(asked, lambda one: _ask(planner, one, places), lambda planned: planned.step_s)


def _ask(planner: str, problem: Problem, places: Sequence[int] | None) -> Planned:
    """The answer for devices in this order."""
    if problem.schedule != AUTO:
        return _planned(planner, problem, find_planner(planner).decide(problem), places)
    ordered = find_order(problem)
    plan = ordered.plan(problem.costs, planner)
    at = [each.device for each in problem.traits] or places or range(problem.devices)
    stages = (replace(stage, devices=(at[stage.devices[0]],)) for stage in plan.stages)
    answered = replace(problem, schedule=ordered.schedule, stages=len(plan.stages))
    return Planned(replace(plan, stages=tuple(stages)), answered, ordered.decision, ordered)


def _planned(
    planner: str, problem: Problem, decision: Decision, places: Sequence[int] | None
) -> Planned:
    where, lists = (
        problem.where if problem.traits or places is None else places,
        problem.schedule.lists,
    )
    plan = decision.plan(problem.costs, problem.schedule.name, planner, where)
    plan = replace(plan, tasks=lists.lines) if isinstance(lists, GivenLists) else plan
    return Planned(plan, problem, decision)
