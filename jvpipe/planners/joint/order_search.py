"""`schedule="auto"`: cuts, chunks, fates and an order of tasks, chosen together.

    placements  1, 2 and 4 chunks per device in a loop, 2 in a vee
    for each    all cuts where there are few, else those that give devices equal work; fates under
                the limit (`device_fates.py`), for all that a rule has in flight or for fewer
                micro-batches
    orders      every rule that then fits, W as late as bytes allow, and list scheduling within the
                room there is
    then        bounds of the best move, their orders are climbed from, and the simulator has the
                last word; it alone knows swaps, which are tried for the best orders

The plans of 1F1B (`rivals`) are simulated beside: the answer is not slower than one of them. Under
a limit 1F1B with fewer micro-batches in flight is among them, down to one, which holds the least of
all: where that fits there is an answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import comb
from operator import lt

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.plan import Plan
from jvpipe.planners.joint.device_fates import DeviceFates, Moments
from jvpipe.planners.joint.effort import ORDER, RULE
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.order_cuts import all_cuts
from jvpipe.planners.joint.order_floor import OrderFloor, order_floors
from jvpipe.planners.joint.order_list import Listing
from jvpipe.planners.joint.order_loads import Loads, Order, order_lists, order_of
from jvpipe.planners.joint.order_refine import first_of_families, refined
from jvpipe.planners.joint.order_rounds import in_rounds
from jvpipe.planners.joint.planner import crowded, jvpipe
from jvpipe.planners.joint.rule_search import RuledPlan, first_cuts, fitting, ruled
from jvpipe.planners.model.forecast import simulated_bubble_fraction, simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem, with_entry
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision, keeps_limits
from jvpipe.schedules.auto import GivenLists, given_lists, lines_of
from jvpipe.schedules.interleaved import ZBH1, Interleaved, InterleavedLists
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B, OneFOneB
from jvpipe.schedules.schedule import Holding, Schedule
from jvpipe.schedules.vee import VSchedule

EAGER = OneFOneB(eager=True)
PLACEMENTS: tuple[tuple[Schedule, ...], ...] = (
    (ZBH1(), ONE_F_ONE_B, EAGER),
    (Interleaved(split=True), Interleaved()),
    (Interleaved(chunks=4, split=True), Interleaved(chunks=4)),
    (VSchedule(), VSchedule(memory="half"), VSchedule(memory="least")),
)
"""The rules for each placement; the first one splits backwards."""
Placement = tuple[tuple[Schedule, ...], DeviceFates]
"""The rules of a placement, and what chooses fates for its devices."""


@dataclass(frozen=True)
class OrderedPlan:
    """The fastest plan that was found: its lists, their rule, seconds, and a bound on any order.

    Devices are idle for `idle` of the step, and lend each other `lent` of that. `whole` are layers
    that could be split, whose backwards stay whole; `others` are the seconds of the rules that fit.
    """

    decision: Decision
    schedule: Schedule
    family: str
    step_s: float
    bound_s: float
    whole: tuple[int, ...] = ()
    others: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    lent: float = 0.0

    @property
    def worth_s(self) -> float:
        """The seconds of a step, less what idle devices lend."""
        return self.step_s * (1 - self.lent * self.idle)

    def answered(self, problem: Problem) -> Problem:
        """Returns the problem with the order that was found, and as many stages as it has."""
        stages = len(self.decision.bounds) - 1
        return replace(problem, schedule=self.schedule, stages=stages)

    def plan(self, problem: Problem, planner: str) -> Plan:
        """Makes the plan with its lists, and each stage on its device, under its planner's name."""
        lists, costs = self.schedule.lists, problem.costs
        assert isinstance(lists, GivenLists)
        ids = costs.ids or tuple(range(len(costs.layers)))
        plan = self.decision.plan(self.answered(problem), planner)
        return replace(plan, tasks=lists.lines, unsplit=tuple(ids[at] for at in self.whole))


def find_order(problem: Problem) -> OrderedPlan:
    """Finds the fastest plan and order that it can; always the same one.

    Args:
        problem: with as many stages as there are devices; its schedule is not looked at.

    Raises:
        Infeasible: no plan was found that keeps the limit.

    >>> from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
    >>> layer = LayerCost("block", 1.0, 2.0, (Option(8),), split=SplitCost(1.0, 1.0, 4, 4))
    >>> costs = Costs((layer,) * 8, tuple(Edge(i, (i + 1,), 0) for i in range(7)))
    >>> plan = find_order(Problem(costs, 2, ONE_F_ONE_B, microbatches=4))
    >>> plan.step_s, plan.bound_s
    (49.0, 49.0)
    """
    problem, whole = _worth_splitting(problem)
    placements = [
        (rules, DeviceFates.of(_under(problem, rules[0]))) for rules in _placements(problem)
    ]
    begin = _candidates(problem, placements)
    rivals = list(_own_rivals(problem))
    if _eager_may_win(problem, begin):
        rivals += _planned(problem, EAGER)
    # Where nothing was found, the plans that hold the least decide whether there is anything.
    floors = [] if begin or rivals else list(_floors(problem))
    rivals += [_in_own_order(problem, one.schedule, one.decision) for one in floors]
    for rival in rivals:
        begin += _from_rival(placements, rival)
    candidates = sorted(begin, key=lambda one: one.step_s)
    simulated = map(_simulated, [*_worth_simulating(problem, candidates), *rivals])
    answers = [answer for answer in simulated if answer is not None]
    if not answers:
        raise _nothing_fits(problem, floors)
    others: dict[str, float] = {}
    for one in candidates:
        others.setdefault(one.family, one.step_s)
    return replace(_chosen(answers, problem.lent), whole=whole, others=others)


def _worth_simulating(
    problem: Problem,
    candidates: Sequence[RuledPlan],
) -> list[RuledPlan]:
    """Refines candidates and picks the best of them, with and without swaps.

    Where transfers wait for each other, of which the clock does not know, there are more of them.
    """
    some = refined(candidates)
    sends = any(any(one.loads.send_s) for one in candidates)
    if problem.peer_uses_host and sends:
        some += [*first_of_families(candidates), *candidates[: ORDER.crowded]]
    else:
        some = some[: ORDER.simulated]
    for one in some[: ORDER.simulated]:
        some += _swapping(one)
    return some


def _nothing_fits(problem: Problem, floors: Sequence[OrderFloor]) -> Infeasible:
    """Makes the error that says under which limit there is a plan."""
    limit = problem.memory_limit_bytes
    assert limit is not None, "without a limit everything may be kept"
    least = min(one.limit_bytes for one in floors)
    return Infeasible(
        f"no order of tasks was found that keeps {limit} bytes per device; {least} would do. "
        f"Raise the limit, add devices, or use smaller micro-batches",
        stage=0,
        excess_bytes=least - limit,
        smallest_limit_bytes=least,
    )


def _chosen(answers: Sequence[OrderedPlan], lent: float) -> OrderedPlan:
    """Picks the most valuable plan; 1F1B's if devices lend their time and no gain is large."""
    best = min(answers, key=lambda one: one.worth_s)
    # 1F1B is what a doubt falls back on, as it is what is known best.
    usual = [one for one in answers if one.family == ONE_F_ONE_B.name]
    doubtful = usual and best.worth_s > (1 - ORDER.doubt * lent) * usual[0].worth_s
    return usual[0] if doubtful else best


def _worth_splitting(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Keeps backwards whole whose halves take much longer; returns also which layers these are.

    Halves fill at most the gaps of a step, which are (D - 1) / M of its work on D devices with M
    micro-batches: where they take longer than the whole by more than that, nothing is gained.
    """
    gaps = (problem.devices - 1) / problem.microbatches
    layers = list(problem.costs.layers)
    whole = list[int]()
    for at, layer in enumerate(layers):
        halves = layer.split
        if halves and halves.input_s + halves.weight_s > (1 + gaps) * layer.backward_s:
            layers[at] = replace(layer, split=None)
            whole.append(at)
    costs = replace(problem.costs, layers=tuple(layers))
    return replace(problem, costs=costs, schedule=ONE_F_ONE_B), tuple(whole)


def _candidates(problem: Problem, placements: Sequence[Placement]) -> list[RuledPlan]:
    """Makes a plan with an order for all placements, cuts, rules and ways to make room.

    If there are few cuts, it begins with all that may be faster than what was found before.
    """
    cuts = Segments(problem).cuts
    every = list[RuledPlan]()
    for rules, fates in placements:
        placed = [_under(problem, rule) for rule in rules]
        few = comb(len(cuts) - 2, placed[0].stages - 1) <= ORDER.all_cuts
        choose_cuts = all_cuts if few else first_cuts
        for bounds in choose_cuts(placed[0], cuts):
            below_s = float("inf")
            if few:
                below_s = min((one.step_s for one in every), default=below_s)
            every += _of_cuts(placed, bounds, fates, below_s, few=few)
    return every


def _of_cuts(
    placed: Sequence[Problem],
    bounds: tuple[int, ...],
    fates: DeviceFates,
    below_s: float,
    *,
    few: bool,
) -> Iterator[RuledPlan]:
    """Yields the orders of all rules, and lists for fates that leave room for micro-batches.

    Args:
        placed: the problem under each rule of a placement.
        bounds: of the stages.
        fates: of that placement.
        below_s: what no order of a plan is below that is looked at.
        few: whether there are so few cuts that more ways to make room are looked at.
    """
    kept = Loads.of(placed[0], Decision.keeping_all(bounds))
    if kept.bound_s() >= below_s:
        return
    # A dictionary as an ordered set: the same plan may come from several rules.
    lists: dict[tuple[Decision, tuple[int, ...]], None] = {}  # plans, and micro-batches in flight
    for one in placed:
        decision = fates.fastest(one, bounds)
        if decision is not None:
            lists[decision, ()] = None
            yield from ruled(one, decision, fates)
    if placed[0].memory_limit_bytes is not None:
        for in_flight, moments in _moments(placed[0], few=few):
            roomy = fates.fastest(placed[0], bounds, moments)
            if roomy and few:
                lists[roomy, in_flight] = None
            if roomy:
                lists[roomy, ()] = None
    for decision, in_flight in lists:
        if Loads.of(placed[0], decision).bound_s() < below_s:
            yield from _listed(placed[0], decision, fates, in_flight)


def _moments(
    problem: Problem,
    *,
    few: bool,
) -> Iterator[tuple[tuple[int, ...], Moments]]:
    """Yields what fates may leave room for: micro-batches of each of a device's stages.

    All devices have as many, or each one fewer than the one before. Between its halves a backward
    needs room too; it is whole where there is none.

    Args:
        problem: whose devices and stages count.
        few: whether there are so few cuts that more ways to make room are looked at.

    Yields:
        The micro-batches in flight on each stage, and the moments of each device.
    """
    limit = min(problem.microbatches, 2 * problem.devices)
    chunks = problem.schedule.chunks
    are_few_layers = len(problem.costs.layers) <= RULE.few_layers
    every = ORDER.in_flight if are_few_layers else ORDER.in_flight[::3]
    firsts = [n for n in every if n <= limit]
    for first, falling in product(firsts, range(1 + few)):
        half = (first + 1) // 2
        for later in sorted({1, half, first}) if chunks > 1 and few else (half,):
            # The first stage of a device holds so many, each of the others as many or fewer.
            counts = [max(1, first - falling * d) for d in range(problem.devices)]
            full = [((k, 0), *[(min(later, k), 0)] * (chunks - 1)) for k in counts]
            in_flight = _in_flight(problem, full)
            yield in_flight, [[moment, *_between(moment)] for moment in full]
            if few:
                yield in_flight, [[moment] for moment in full]


def _in_flight(problem: Problem, full: Sequence[Holding]) -> tuple[int, ...]:
    """Lists the micro-batches in flight by stage, from those of each device's stages."""
    of_device = [iter(moment) for moment in full]
    return tuple(next(of_device[d])[0] for d in problem.places)


def _between(moment: Holding) -> Iterator[Holding]:
    """Yields a moment with one micro-batch of each stage between the halves of its backward."""
    for c, (k, _) in enumerate(moment):
        yield with_entry(moment, c, (k - 1, 1))


def _under(problem: Problem, rule: Schedule) -> Problem:
    """Gives the problem under a rule, with as many stages as that has."""
    return replace(problem, stages=rule.stages_on(problem.devices), schedule=rule)


def _placements(problem: Problem) -> Iterator[tuple[Schedule, ...]]:
    """Yields the rules of each placement of which the problem has enough layers and devices."""
    most_stages = len(Segments(problem).cuts) - 1
    # One device gains nothing by chunks, and carried model state must stay in one stage.
    together = problem.devices == 1 or bool(problem.costs.carried)
    for rules in PLACEMENTS:
        rule = rules[0]
        is_chunked = rule.chunks > 1
        has_layers = rule.stages_on(problem.devices) <= most_stages
        if has_layers and not (together and is_chunked):
            yield rules


def _listed(
    problem: Problem,
    decision: Decision,
    fates: DeviceFates,
    in_flight: tuple[int, ...] = (),
) -> Iterator[RuledPlan]:
    """Yields orders by list scheduling; with one chunk also zb-h1's, W as late as bytes allow."""
    loads = Loads.of(problem, decision)
    schedule = problem.schedule
    name = schedule.name
    plain = RuledPlan(problem, decision, loads, [], name, fates)
    limited = problem.memory_limit_bytes is not None
    rooms = [] if in_flight else _smaller_rooms(loads)
    if limited:
        rooms.append(loads.room_bytes)
    for room in rooms:
        for patience, eager in product(ORDER.patiences, (False, True)):
            listing = Listing(loads, room, patience, eager=eager, in_flight=in_flight)
            if listing.order is not None:
                yield from fitting(plain, listing.order, f"{name}, listed")
    if in_flight:
        return
    if schedule.chunks == 1:
        for order in in_rounds(loads, loads.room_bytes):
            yield from fitting(plain, order, f"{name}, in rounds")
    if limited and not schedule.vee:
        late = tuple(_late(problem, loads, d) for d in range(problem.devices))
        rule = Interleaved(chunks=schedule.chunks, split=True, late=late)
        order = order_of(rule.tasks(problem.devices, problem.microbatches))
        yield from fitting(plain, order, f"{name}, late by bytes")


def _smaller_rooms(loads: Loads) -> list[Sequence[float]]:
    """Lists rooms for multiples of D micro-batches in flight, if all devices have room for them."""
    D = loads.devices
    units = [sum(loads.kept_bytes[s] for s in loads.stages_on(d)) for d in range(D)]
    rooms = list[Sequence[float]]()
    for cap in ORDER.caps:
        room = [cap * D * unit for unit in units]
        if all(map(lt, room, loads.room_bytes)):
            rooms.append(room)
    return rooms


def _late(problem: Problem, loads: Loads, d: int) -> int:
    """Counts by how many backwards W may be late on a device."""
    for late in range(d, 0, -1):
        order = _all_late(problem.schedule.chunks, late, loads.devices, problem.microbatches)
        if loads.peak_bytes(order[d]) <= loads.room_bytes[d]:
            return late
    return 0


@lru_cache(maxsize=64)
def _all_late(
    chunks: int,
    late: int,
    devices: int,
    microbatches: int,
) -> Order:
    """Makes the order in which W is equally late on all devices.

    A device's own order depends on its own lateness alone.
    """
    lists = InterleavedLists(chunks, split=True, late=(late,) * devices)
    return order_of(lists(devices, microbatches))


def _in_lists(one: RuledPlan) -> Problem:
    """Gives a candidate's problem with the candidate's order as its schedule."""
    lines = lines_of(order_lists(one.order))
    return replace(one.problem, schedule=given_lists(lines))


def _simulated(one: RuledPlan) -> OrderedPlan | None:
    """Simulates a candidate; None if a device holds more than the limit after all."""
    problem = _in_lists(one)
    evaluation = evaluate_decision(problem, one.decision)
    if not keeps_limits(problem, evaluation):
        return None
    step_s = simulated_step_s(problem, evaluation.stages)
    idle = 0.0
    if problem.lent:  # copies need workers too
        copies_s = problem.microbatches * sum(stage.comm_s for stage in evaluation.stages)
        copying = copies_s / (problem.devices * step_s)
        idle = simulated_bubble_fraction(problem, evaluation.stages) - copying
    return OrderedPlan(
        one.decision,
        problem.schedule,
        one.family,
        step_s,
        one.loads.bound_s(),
        idle=max(0.0, idle),
        lent=problem.lent,
    )


def _in_own_order(
    problem: Problem,
    schedule: Schedule,
    decision: Decision,
) -> RuledPlan:
    """Makes the candidate of a plan in the order of a schedule's rule, whether it fits or not."""
    under = _under(problem, schedule)
    order = order_of(schedule.tasks(problem.devices, problem.microbatches))
    return RuledPlan(under, decision, Loads.of(under, decision), order, schedule.name)


def _planned(
    problem: Problem,
    rule: Schedule,
    *,
    refine: bool = True,
) -> Iterator[RuledPlan]:
    """Yields the plan of a form of 1F1B with the best cuts and fates, swaps among them."""
    with suppress(Infeasible):
        refine = refine and len(problem.costs.layers) <= RULE.refined_layers
        decision = jvpipe(replace(problem, schedule=rule), refine)
        yield _in_own_order(problem, rule, decision)


def _own_rivals(problem: Problem) -> Iterator[RuledPlan]:
    """Yields 1F1B's plan; if it may not keep all, also those of 1, 2, 4, ... in flight.

    With fewer in flight devices are idle for longer, but compute less again. If one is too many,
    all are.
    """
    usual = list(_planned(problem, ONE_F_ONE_B))
    devices = problem.devices
    in_flight = 1
    yield from usual
    # Doubled as long as it fits and 1F1B has to give up something; it ends at as many as there are
    # devices.
    while in_flight < devices and all(any(one.decision.choices) for one in usual):
        rule = OneFOneB(most=[min(in_flight, devices - d) for d in range(devices)])
        fewer = list(_planned(problem, rule, refine=False))
        yield from fewer
        in_flight = 2 * in_flight if fewer else devices


def _floors(problem: Problem) -> Iterator[OrderFloor]:
    """Yields the plans that hold the least, which decide whether there is any.

    With many layers, one stage per device holds as little as several do, or nearly so.
    """
    few = len(problem.costs.layers) <= RULE.few_layers
    rules = [rules[0] for rules in _placements(problem)]
    return order_floors(problem, rules if few else rules[:1])


def _eager_may_win(problem: Problem, candidates: Sequence[RuledPlan]) -> bool:
    """Tells whether an eager 1F1B, which sends do not hold up, may beat all candidates."""
    if problem.peer == INFINITE:
        return False
    if problem.peer_uses_host:  # the clock does not know of links that are shared
        return True
    least_s = lower_bound(replace(problem, schedule=EAGER)) * (1 - problem.lent)
    return least_s < min((one.step_s for one in candidates), default=float("inf"))


def _from_rival(
    placements: Sequence[Placement],
    rival: RuledPlan,
) -> Iterator[RuledPlan]:
    """Yields other orders for a plan of 1F1B; if that swaps, for its cuts."""
    problem = rival.problem
    decision = rival.decision
    schedule = rival.problem.schedule
    for rules, fates in placements:
        rule = rules[0]
        if (rule.chunks, rule.vee) != (schedule.chunks, schedule.vee):
            continue
        stages = evaluate_decision(problem, decision).stages
        swaps = any(stage.held.swapped for stage in stages)
        plain = fates.fastest(problem, decision.bounds) if swaps else decision
        if plain is not None:
            yield from _listed(_under(problem, rule), plain, fates)


def _swapping(one: RuledPlan) -> Iterator[RuledPlan]:
    """Yields the order of a candidate with fates that may swap, which the clock does not know."""
    problem = _in_lists(one)
    if problem.memory_limit_bytes is not None:
        fates = DeviceFates.of(crowded(problem), swaps=True)
        decision = fates.fastest(problem, one.decision.bounds)
        if decision is not None and decision != one.decision:
            yield replace(one, decision=decision)
