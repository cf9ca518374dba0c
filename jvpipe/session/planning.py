"""From a traced model to its plan: what must be measured is measured, and the planner asked."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jvpipe._jax import Device, is_own
from jvpipe.cost.archive import Archive
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.model import Work, costs_of
from jvpipe.ir.plan import Plan
from jvpipe.planners import FateRule, find_planner
from jvpipe.planners.joint.floor import Floor, floor
from jvpipe.planners.joint.order_search import Found, find_order
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.model import layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import AUTO, may_split
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced

_ATTEMPTS = 5
_log = logging.getLogger("jvpipe")
_NEAR = 1.2
"""How many times what a plan holds a planner may count."""


@dataclass(frozen=True)
class Request:
    """A request for a plan; `places[s]` is the device of stage s."""

    planner: str
    stages: int
    schedule: Schedule
    microbatches: int
    places: tuple[int, ...]
    memory_limit_bytes: int | None = None
    host_limit_bytes: int | None = None

    @property
    def chooses(self) -> bool:
        """True if fates are to be chosen: by a planner that does, under a limit."""
        return self.memory_limit_bytes is not None and find_planner(self.planner).fate_rule is FateRule.CHOOSES

    @property
    def splits(self) -> bool:
        """True if the schedule runs backwards in two halves, or may come to."""
        return may_split(self.schedule, self.stages // self.schedule.chunks, self.microbatches)


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was decided on; `found` is what else is known of an order that was searched for."""

    plan: Plan
    problem: Problem
    decision: Decision
    found: Found | None = None

    @property
    def layer_s(self) -> list[float] | None:
        """Seconds of each layer's forward and backward, if they were measured."""
        seconds = [layer.forward_s + layer.backward_s for layer in self.problem.costs.layers]
        return seconds if any(seconds) else None

    @property
    def recompute_s(self) -> float:
        """Seconds per step of all devices together that go into what layers do not keep."""
        chosen = zip(self.problem.costs.layers, self.decision.choices, strict=True)
        return self.problem.microbatches * sum(layer.options[c].extra_s for layer, c in chosen if c >= 0)


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
    first, *others = (devices[place] for place in dict.fromkeys(request.places))
    others = [device for device in others if is_own(device)]
    links = None
    if not find_planner(request.planner).asks_seconds:
        signatures = [programs.signature for programs in layer_programs(store, traced)]
        costs: Costs = costs_of(
            traced.graph, signatures, [Work(0.0, 0.0)] * len(signatures), None, optimizer, request.microbatches
        )
    else:
        options = {"fates": request.chooses, "split": request.splits, "known": known}
        options |= {"room_bytes": room_bytes, "archive": archive}
        costs = measured_costs(traced, first, store, optimizer, request.microbatches, **options)
        links = links_between(first, others[0] if others else None, archive) if others or request.chooses else None
    return Problem(
        costs,
        request.stages,
        request.schedule,
        request.microbatches,
        request.memory_limit_bytes,
        request.host_limit_bytes,
        host=links.host if links and request.chooses else INFINITE,
        peer=between_hosts or (links.send if links else INFINITE),
        peer_uses_host=links is not None and request.chooses and links.send_uses_host,
    )


def decide(request: Request, problem: Problem, held_bytes_of: Callable[[Plan], Sequence[int]]) -> Planned:
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
    limit, planner = request.memory_limit_bytes, find_planner(request.planner)
    if limit is None or not planner.asks_seconds:
        return ask(request.planner, problem, request.places)
    roomy = request.schedule == AUTO or _NEAR * least_kept_bytes(problem) <= limit  # others may hold less than 1F1B
    least = None if roomy else _least(request, problem, limit, held_bytes_of)
    planned = _unlimited(request, problem, held_bytes_of) or _within(request, problem, least, held_bytes_of)
    if planned is None:
        least = least or _least(request, problem, limit, held_bytes_of)
        planned = _planned(request, problem, least.decision)
        if request.planner != "jvpipe":
            told = "%s finds no plan that keeps the limit of %d bytes: the one that holds the least is taken"
            _log.warning(told, request.planner, limit)
    return planned


def _least(request: Request, problem: Problem, limit: int, held_bytes_of: Callable[[Plan], Sequence[int]]) -> Floor:
    """The plan that holds the least, if it keeps the limit."""

    def held_bytes(decision: Decision) -> Sequence[int]:
        return held_bytes_of(_planned(request, problem, decision).plan)

    least = floor(problem, held_bytes, limit, keeps=find_planner(request.planner).fate_rule is FateRule.KEEPS)
    if least.bytes > limit:
        raise MemoryLimitExceeded(
            f"no plan of {request.planner} keeps the limit of {limit:,} bytes per device: stage {least.stage} would "
            f"hold the most. A limit of {least.bytes:,} bytes would do; so may more stages or more micro-batches",
            least.bytes,
        )
    return least


def _unlimited(request: Request, problem: Problem, held_bytes_of: Callable[[Plan], Sequence[int]]) -> Planned | None:
    """The plan of no limit, for a planner that chooses fates, if the lists say that it keeps the limit.

    It may keep it even if the planner, whose count is near what the lists hold and never much below it, counts more.
    """
    limit, free = request.memory_limit_bytes, replace(problem, memory_limit_bytes=None, host_limit_bytes=None)
    assert limit is not None
    if not request.chooses or least_kept_bytes(problem) > _NEAR * limit:
        return None
    planned = ask(request.planner, free, request.places)
    near = evaluate(planned.problem, planned.decision).peak_bytes <= _NEAR * limit
    planned = replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
    return planned if near and max(held_bytes_of(planned.plan)) <= limit else None


def _within(
    request: Request, problem: Problem, least: Floor | None, held_bytes_of: Callable[[Plan], Sequence[int]]
) -> Planned | None:
    """The planner's plan under the limit; should the lists hold more than it counts, under a limit smaller by as much.

    At first the planner may count as much as it does for the plan that holds the least.
    """
    limit = request.memory_limit_bytes
    assert limit is not None
    counted = evaluate(problem, least.decision).peak_bytes if least else limit
    asked, before = replace(problem, memory_limit_bytes=max(limit, counted)), None
    for _ in range(_ATTEMPTS):
        try:
            planned = ask(request.planner, asked, request.places)
        except Infeasible:
            return None
        if planned.plan == before:
            return None
        over = max(held_bytes_of(planned.plan)) - limit
        if over <= 0:
            return replace(planned, problem=replace(planned.problem, memory_limit_bytes=limit))
        asked = replace(asked, memory_limit_bytes=max((asked.memory_limit_bytes or 0) - over, 1))
        before = planned.plan
    return None


def ask(planner: str, problem: Problem, places: Sequence[int] | None = None) -> Planned:
    """Asks a planner, and for the order of tasks too where it is left open.

    Args:
        planner: by its name.
        problem: to be answered; that of the answer has its order.
        places: of the stages, or of the devices where the order is open; their numbers unless given.

    Raises:
        Infeasible: it finds nothing that keeps the limit.
    """
    if problem.schedule != AUTO:
        decision = find_planner(planner).decide(problem)
        plan = decision.plan(problem.costs, problem.schedule.name, planner, places or problem.places)
        return Planned(plan, problem, decision)
    found = find_order(problem)
    plan = found.plan(problem.costs, planner)
    at = places or range(problem.devices)
    stages = (replace(stage, devices=(at[stage.devices[0]],)) for stage in plan.stages)
    answered = replace(problem, schedule=found.schedule, stages=len(plan.stages))
    return Planned(replace(plan, stages=tuple(stages)), answered, found.decision, found)


def _planned(request: Request, problem: Problem, decision: Decision) -> Planned:
    places: Sequence[int] = request.places
    return Planned(decision.plan(problem.costs, request.schedule.name, request.planner, places), problem, decision)
