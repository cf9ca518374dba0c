"""From a traced model to its plan: what must be measured is measured, and the planner asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jvpipe._jax import Device
from jvpipe.cost.costs import Costs
from jvpipe.cost.links import measure_links
from jvpipe.cost.measure import measured_costs
from jvpipe.cost.model import Work, costs_of
from jvpipe.ir.plan import Plan
from jvpipe.planners import CHOOSING, UNTIMED, find_planner
from jvpipe.planners.infeasible import Infeasible
from jvpipe.planners.problem import Decision, Problem
from jvpipe.programs.model import layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.schedules import find_schedule
from jvpipe.trace.graph import Traced

_ATTEMPTS = 6


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


def measure(request: Request, traced: Traced, optimizer: OptimizerCut, device: Device, store: ProgramStore) -> Problem:
    """The planner's question: bytes always, seconds if it asks for them, fates and links if it chooses."""
    if request.planner in UNTIMED:
        signatures = [programs.signature for programs in layer_programs(store, traced)]
        costs: Costs = costs_of(
            traced.graph, signatures, [Work(0.0, 0.0)] * len(signatures), None, optimizer, request.microbatches
        )
    else:
        costs = measured_costs(traced, device, store, optimizer, request.microbatches, fates=request.chooses)
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

    Planners count a stage's bytes by a formula that is near the buffer table of the lowered step. Should a plan need
    more than the limit, the planner is asked again under a limit that is smaller by as much. Should the planner find
    nothing, the plan of the smallest limit by its count may still keep the limit.

    Raises:
        MemoryLimitExceeded: no plan keeps the limit.
    """
    limit, asked, attempts = request.memory_limit_bytes, problem, 0
    while True:
        try:
            decision = find_planner(request.planner)(asked)
        except Infeasible as infeasible:
            return _smallest(request, problem, infeasible, peak_bytes_of)
        planned = Planned(_plan(request, problem, decision), problem, decision)
        if limit is None or not request.chooses:
            return planned
        over, attempts = peak_bytes_of(planned.plan) - limit, attempts + 1
        if over <= 0:
            return planned
        assert asked.memory_limit_bytes is not None
        less = asked.memory_limit_bytes - over if attempts < _ATTEMPTS else 1
        asked = replace(asked, memory_limit_bytes=max(less, 1))


def _smallest(
    request: Request, problem: Problem, infeasible: Infeasible, peak_bytes_of: Callable[[Plan], int]
) -> Planned:
    """The plan that the planner finds under the smallest limit, if that keeps the limit; else the error."""
    limit = request.memory_limit_bytes
    assert limit is not None, "without a limit there is a plan"
    decision = find_planner(request.planner)(replace(problem, memory_limit_bytes=infeasible.smallest_limit_bytes))
    planned = Planned(_plan(request, problem, decision), problem, decision)
    smallest = peak_bytes_of(planned.plan)
    if smallest <= limit:
        return planned
    raise MemoryLimitExceeded(
        f"no plan of {request.planner} keeps the limit of {limit:,} bytes per device: stage {infeasible.stage} would "
        f"hold the most. A limit of {smallest:,} bytes would do; so may more stages or more micro-batches",
        smallest,
    ) from infeasible


def _plan(request: Request, problem: Problem, decision: Decision) -> Plan:
    places: Sequence[int] = request.places
    return decision.plan(problem.costs, request.schedule, request.planner, places)
