"""From a traced model to its plan: what must be measured is measured, and the planner asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jvpipe._jax import Device
from jvpipe.cost.costs import Costs
from jvpipe.cost.links import measure_links
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.model import Work, costs_of
from jvpipe.ir.plan import Plan
from jvpipe.planners import CHOOSING, UNTIMED, find_planner
from jvpipe.planners.infeasible import Infeasible
from jvpipe.planners.kept import least_kept_bytes
from jvpipe.planners.memory import evaluate
from jvpipe.planners.problem import Decision, Problem
from jvpipe.programs.model import layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.schedules import find_schedule
from jvpipe.trace.graph import Traced

_ATTEMPTS = 7
_NEAR = 1.2
"""How many times what a plan holds a planner may count."""


@dataclass(frozen=True)
class Request:
    """What the user wants of a plan; `places[s]` is the device of stage s."""

    planner: str
    stages: int
    schedule: str
    microbatches: int
    places: tuple[int, ...]
    memory_limit_bytes: int | None = None
    host_limit_bytes: int | None = None

    @property
    def chooses(self) -> bool:
        """Whether fates are to be chosen: by a planner that does, under a limit."""
        return self.memory_limit_bytes is not None and self.planner in CHOOSING


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was decided on."""

    plan: Plan
    problem: Problem
    decision: Decision

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
    device: Device,
    store: ProgramStore,
    known: Runs | None = None,
    room_bytes: int | None = None,
) -> Problem:
    """The planner's question: bytes always, seconds if it asks for them, fates and links if it chooses.

    What is `known` of programs is not measured again, and nothing that the device has no room for.
    """
    if request.planner in UNTIMED:
        signatures = [programs.signature for programs in layer_programs(store, traced)]
        costs: Costs = costs_of(
            traced.graph, signatures, [Work(0.0, 0.0)] * len(signatures), None, optimizer, request.microbatches
        )
    else:
        options = {"fates": request.chooses, "known": known, "room_bytes": room_bytes}
        costs = measured_costs(traced, device, store, optimizer, request.microbatches, **options)
    problem = Problem(
        costs,
        request.stages,
        find_schedule(request.schedule),
        request.microbatches,
        request.memory_limit_bytes,
        request.host_limit_bytes,
        peer_uses_host=False,
    )
    return replace(problem, host=measure_links(device).host) if request.chooses else problem


def decide(request: Request, problem: Problem, peak_bytes_of: Callable[[Plan], int]) -> Planned:
    """Asks the planner.

    Planners count a stage's bytes by a formula that is near the buffer table of the lowered step, never much below it.
    Where the plan of no limit keeps the limit by that table, it is the plan, even if the planner counts more. Should a
    plan need more than the limit, the planner is asked again under a limit that is smaller by as much. Should the
    planner find nothing, the plan of the smallest limit by its count may still keep the limit.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit.
    """
    try:
        return _unlimited(request, problem, peak_bytes_of) or _within(request, problem, peak_bytes_of)
    except Infeasible as infeasible:
        return _smallest(request, problem, infeasible, peak_bytes_of)


def _unlimited(request: Request, problem: Problem, peak_bytes_of: Callable[[Plan], int]) -> Planned | None:
    """The plan of no limit, for a planner that chooses fates, if the table says that it keeps the limit."""
    limit, free = request.memory_limit_bytes, replace(problem, memory_limit_bytes=None, host_limit_bytes=None)
    if limit is None or not request.chooses or least_kept_bytes(problem) > _NEAR * limit:
        return None
    found = _planned(request, problem, find_planner(request.planner)(free))
    near = evaluate(free, found.decision).peak_bytes <= _NEAR * limit
    return found if near and peak_bytes_of(found.plan) <= limit else None


def _within(request: Request, problem: Problem, peak_bytes_of: Callable[[Plan], int]) -> Planned:
    """The planner's plan; under smaller and smaller limits, if it needs more than its limit.

    Raises:
        Infeasible: the planner finds nothing.
    """
    limit, asked = request.memory_limit_bytes, problem
    for attempt in range(_ATTEMPTS):
        found = _planned(request, problem, find_planner(request.planner)(asked))
        over = peak_bytes_of(found.plan) - limit if limit is not None and request.chooses else 0
        if over <= 0:
            return found
        less = (asked.memory_limit_bytes or 0) - over if attempt < _ATTEMPTS - 2 else 1
        asked = replace(asked, memory_limit_bytes=max(less, 1))
    raise AssertionError("a planner finds nothing that keeps a limit of one byte")


def _smallest(
    request: Request, problem: Problem, infeasible: Infeasible, peak_bytes_of: Callable[[Plan], int]
) -> Planned:
    """The plan of the smallest limit by the planner's count, if it keeps the limit by the table; else the error."""
    limit, decision = request.memory_limit_bytes, infeasible.decision
    assert limit is not None, "without a limit there is a plan"
    if decision is None:
        decision = find_planner(request.planner)(replace(problem, memory_limit_bytes=infeasible.smallest_limit_bytes))
    found = _planned(request, problem, decision)
    smallest = peak_bytes_of(found.plan)
    if smallest <= limit:
        return found
    raise MemoryLimitExceeded(
        f"no plan of {request.planner} keeps the limit of {limit:,} bytes per device: stage {infeasible.stage} would "
        f"hold the most. A limit of {smallest:,} bytes would do; so may more stages or more micro-batches",
        smallest,
    ) from infeasible


def _planned(request: Request, problem: Problem, decision: Decision) -> Planned:
    places: Sequence[int] = request.places
    return Planned(decision.plan(problem.costs, request.schedule, request.planner, places), problem, decision)
