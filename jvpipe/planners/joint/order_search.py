"""Searches the plan for `schedule="auto"`: cuts, chunks, fates and an order of tasks together.

A placement assigns stages to devices: how many chunks (stages per device), in a loop (0, 1, 0, 1)
or in a vee (0, 1, 1, 0). A rule is a schedule that gives an order of tasks for a placement. I
and W are the first and the second half of a split backward. The search has these steps:

    placements  1, 2 and 4 chunks per device in a loop, 2 chunks in a vee (`PLACEMENTS`)
    cuts        all cuts of a placement if there are few, else those that give devices equal work
                and, if sends take time, the best by a closed formula (`surrogate.py`)
    fates       the fastest that fit the limit with as many micro-batches in flight as a rule has,
                and with other numbers of them (`ORDER.in_flight`)
    orders      from rules, from rules with W as late as bytes allow, from list scheduling
                (`order_list.py`) and in rounds (`order_rounds.py`)
    refining    bounds and orders of the best candidates change by small moves (`order_refine.py`)
    simulating  the best are simulated, and the simulator's seconds decide; swaps, which only the
                simulator can time, are tried for the best orders
    polishing   if links are shared or values are swapped, orders of the best change once more, by
                moves that the simulator judges (`order_polish.py`)

The plans of 1F1B, called rivals, are simulated too. So the answer is never slower than any of them,
unless devices share workers (`_chosen`). Under a limit there are also rivals with fewer
micro-batches in flight, down to one. No order holds less than the one with a single micro-batch in
flight. So the search has an answer if any plan fits in that order. `effort.py` sets how much is
tried.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import comb
from operator import lt

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.task import TaskLists
from jvpipe.planners.joint.device_fates import DeviceFates, Moments
from jvpipe.planners.joint.effort import ORDER, RULE
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.order_cuts import all_cuts
from jvpipe.planners.joint.order_floor import OrderFloor, order_floors
from jvpipe.planners.joint.order_list import Listing
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.joint.order_polish import polished
from jvpipe.planners.joint.order_refine import first_of_families, refined
from jvpipe.planners.joint.order_rounds import in_rounds
from jvpipe.planners.joint.ordered_plan import OrderedPlan, simulated_plan, under
from jvpipe.planners.joint.plan_search import crowded, jvpipe
from jvpipe.planners.joint.rule_search import RuledPlan, first_cuts, fitting
from jvpipe.planners.model.even import busiest_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem, with_entry
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision
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
"""The rules of each placement. The first must split backwards, as searched orders do."""
Placement = tuple[list[Problem], DeviceFates]
"""The problem under each rule of a placement, and the search that chooses fates for its devices."""


def find_order(problem: Problem) -> OrderedPlan:
    """Searches for the fastest plan and order; equal problems always get the same answer.

    Args:
        problem: with as many stages as there are devices; its schedule is ignored.

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
    placements = [(placed, DeviceFates.of(placed[0])) for placed in _placements(problem)]
    begin = _candidates(problem, placements)
    rivals = list(_own_rivals(problem))
    if _eager_may_win(problem, begin):
        rivals += _planned(problem, EAGER)
    # If nothing was found, the plans that hold the least decide whether any plan fits.
    floors = [] if begin or rivals else list(_floors(problem))
    rivals += [RuledPlan.of(under(problem, one.schedule), one.decision) for one in floors]
    for rival in rivals:
        begin += _from_rival(placements, rival)
    candidates = sorted(begin, key=lambda one: one.step_s)
    worth = [*_worth_simulating(problem, candidates), *rivals]
    simulated = [(one, plan) for one in worth if (plan := simulated_plan(one))]
    if not simulated:
        raise _nothing_fits(problem, floors)
    answers = [plan for _, plan in simulated] + list(polished(simulated))
    others: dict[str, float] = {}
    for one in candidates:
        others.setdefault(one.family, one.step_s)
    return replace(_chosen(answers, problem.lent), whole=whole, others=others)


def _worth_simulating(
    problem: Problem,
    candidates: Sequence[RuledPlan],
) -> list[RuledPlan]:
    """Refines candidates and picks those worth simulating, with and without swaps.

    More are picked if transfers share a link and wait for each other. Candidates are ranked by the
    times of `order_course.py`, which leave these waits out.
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
    """Makes the error that names a limit under which a plan exists."""
    least = min(one.limit_bytes for one in floors)
    return Infeasible(
        f"no order of tasks was found that keeps {problem.limit_said}; "
        f"{problem.enough_said(least)} would do. "
        f"Raise the limit, add devices, or use smaller micro-batches",
        smallest_limit_bytes=least,
    )


def _chosen(answers: Sequence[OrderedPlan], lent: float) -> OrderedPlan:
    """Picks the plan with the least `worth_s`, or 1F1B's plan if the gain over it is doubtful."""
    best = min(answers, key=lambda one: one.worth_s)
    # Devices that lend time share workers, so their measured seconds are uncertain, and a small
    # gain is doubtful.
    usual = (one for one in answers if one.family == ONE_F_ONE_B.name)
    best_usual = min(usual, key=lambda one: one.worth_s, default=best)
    doubtful = best.worth_s > (1 - ORDER.doubt * lent) * best_usual.worth_s
    return best_usual if doubtful else best


def _worth_splitting(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Returns the problem without splits that cost too much, and the layers left unsplit.

    Halves gain time only because W fills gaps. On D devices with M micro-batches, gaps take
    (D - 1) / M of a step's work. So nothing is gained if the two halves take longer than the whole
    backward by more than this fraction of the backward.
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
    """Makes plans with orders, for all placements, cuts, rules and ways to make room.

    If a placement has few choices of cuts, all are tried, except those whose lower bound is not
    below the seconds of the best plan so far.
    """
    cuts = Segments(problem).cuts
    every = list[RuledPlan]()
    for placed, fates in placements:
        stages = placed[0].stages
        few = comb(len(cuts) - 2, stages - 1) <= ORDER.all_cuts
        bounded = all_cuts(stages, cuts, busiest_s(placed[0])) if few else first_cuts(placed[0])
        for bounds in bounded:
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
    """Yields plans with these bounds: in the order of each rule, and in searched orders.

    Args:
        placed: the problem under each rule of a placement.
        bounds: of the stages.
        fates: chooses fates for the placement.
        below_s: nothing is yielded unless keeping everything may take less than these seconds.
            Searched orders are yielded only for fates that may take less.
        few: whether cuts are few enough to try more ways to make room.
    """
    first = placed[0]
    keeping = Loads.of(first, Decision.keeping_all(bounds))
    if keeping.bound_s() >= below_s:
        return
    # Keys are a decision and the most micro-batches in flight on each stage; (): as many as fit.
    # A dictionary, unlike a set, keeps them in order.
    lists: dict[tuple[Decision, tuple[int, ...]], None] = {}
    for one in placed:
        decision = fates.fastest(one, bounds)
        if decision is not None:
            lists[decision, ()] = None
            ruled = RuledPlan.of(one, decision, fates)
            yield from fitting(ruled, ruled.order)
    if first.memory_limit_bytes is not None:
        for in_flight, moments in _moments(first, few=few):
            roomy = fates.fastest(first, bounds, moments)
            if roomy and few:
                lists[roomy, in_flight] = None
            if roomy:
                lists[roomy, ()] = None
    for decision, in_flight in lists:
        plain = RuledPlan.of(first, decision, fates)
        if plain.loads.bound_s() < below_s:
            yield from _listed(plain, in_flight)


def _moments(problem: Problem, *, few: bool) -> Iterator[tuple[tuple[int, ...], Moments]]:
    """Yields numbers of micro-batches in flight for which fates must leave room.

    Each comes with room for one backward between its halves. With `few`, each also comes without
    that room, so that backwards stay whole. There are then also numbers that fall by one from each
    device to the next.

    Yields:
        The micro-batches in flight on each stage, and the moments of each device: what its stages
        have in flight at once, as `Schedule.held` gives it.
    """
    limit = min(problem.microbatches, 2 * problem.devices)
    chunks = problem.schedule.chunks
    are_few_layers = len(problem.costs.layers) <= RULE.few_layers
    every = ORDER.in_flight if are_few_layers else ORDER.in_flight[::3]
    firsts = [n for n in every if n <= limit]
    for first, falling in product(firsts, range(1 + few)):
        half = (first + 1) // 2
        for later in sorted({1, half, first}) if chunks > 1 and few else (half,):
            # A device's first stage has k in flight, each of its other stages min(later, k).
            counts = [max(1, first - falling * d) for d in range(problem.devices)]
            full = [((k, 0), *[(min(later, k), 0)] * (chunks - 1)) for k in counts]
            places = enumerate(problem.places)
            in_flight = tuple(full[d][s // problem.devices][0] for s, d in places)
            yield in_flight, [[moment, *_between(moment)] for moment in full]
            if few:
                yield in_flight, [[moment] for moment in full]


def _between(moment: Holding) -> Iterator[Holding]:
    """Yields the moment once per stage, with one micro-batch of that stage between its halves."""
    for c, (k, _) in enumerate(moment):
        yield with_entry(moment, c, (k - 1, 1))


def _placements(problem: Problem) -> Iterator[list[Problem]]:
    """Yields the problem under the rules of each placement, if it has enough layers and devices."""
    most_stages = len(Segments(problem).cuts) - 1
    # One device gains nothing by chunks, and layers that carry model state must share a stage.
    together = problem.devices == 1 or problem.costs.carried
    for rules in PLACEMENTS:
        has_layers = rules[0].stages_on(problem.devices) <= most_stages
        if has_layers and not (together and rules[0].chunks > 1):
            yield [under(problem, rule) for rule in rules]


def _listed(plain: RuledPlan, in_flight: tuple[int, ...] = ()) -> Iterator[RuledPlan]:
    """Yields the plan in searched orders that fit: listed, in rounds, or with W late.

    Orders in rounds need one chunk per device, and orders with W late need a limit and a loop. Both
    are made only if `in_flight` is empty.

    Args:
        plain: the plan; its own order is not used.
        in_flight: the most micro-batches in flight on each stage; empty: as many as fit.
    """
    problem = plain.problem
    loads = plain.loads
    schedule = problem.schedule
    name = schedule.name
    limited = problem.memory_limit_bytes is not None
    rooms = [] if in_flight else _smaller_rooms(loads)
    for room in [*rooms, loads.room_bytes] if limited else rooms:
        for eager in (False, True):
            listing = Listing(loads, room, eager=eager, in_flight=in_flight)
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
        order = rule.tasks(problem.devices, problem.microbatches)
        yield from fitting(plain, order, f"{name}, late by bytes")


def _smaller_rooms(loads: Loads) -> list[list[float]]:
    """Lists, for each of `ORDER.caps`, the room for that many micro-batches times D, the devices.

    A room is what micro-batches in flight may hold on each device. A room is left out unless all
    devices really have more.
    """
    D = loads.devices
    rooms = ([cap * D * unit for unit in loads.unit_bytes] for cap in ORDER.caps)
    return [room for room in rooms if all(map(lt, room, loads.room_bytes))]


def _late(problem: Problem, loads: Loads, d: int) -> int:
    """Counts by how many backwards W can be late on device `d` within the device's room."""
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
) -> TaskLists:
    """Makes the order in which W is equally late on all devices; cached for `_late`.

    `_late` reads the tasks of one device, which depend only on how late W is on that device.
    """
    lists = InterleavedLists(chunks, split=True, late=(late,) * devices)
    return lists(devices, microbatches)


def _planned(
    problem: Problem,
    rule: Schedule,
    *,
    refine: bool = True,
) -> Iterator[RuledPlan]:
    """Yields the plan of a form of 1F1B, with cuts and fates by `jvpipe`; nothing if none fits.

    Its fates may swap, unlike those of other candidates.
    """
    with suppress(Infeasible):
        refine = refine and len(problem.costs.layers) <= RULE.refined_layers
        decision = jvpipe(replace(problem, schedule=rule), refine)
        yield RuledPlan.of(under(problem, rule), decision)


def _own_rivals(problem: Problem) -> Iterator[RuledPlan]:
    """Yields the plan of 1F1B and, unless it keeps everything, plans with fewer in flight.

    The latter have at most 1, 2, 4, ... micro-batches in flight. With fewer in flight, devices are
    idle for longer, but recompute less.
    """
    usual = list(_planned(problem, ONE_F_ONE_B))
    devices = problem.devices
    in_flight = 1
    yield from usual
    # The number doubles as long as a plan fits: if k in flight do not fit, more do not either. It
    # stays below the number of devices, which is what 1F1B itself has in flight.
    while in_flight < devices and all(any(one.decision.choices) for one in usual):
        rule = OneFOneB(most=[min(in_flight, devices - d) for d in range(devices)])
        fewer = list(_planned(problem, rule, refine=False))
        yield from fewer
        in_flight = 2 * in_flight if fewer else devices


def _floors(problem: Problem) -> Iterator[OrderFloor]:
    """Yields the plans that hold the least, which decide whether any plan fits.

    With many layers, one stage per device holds nearly as little as several stages. So only the
    first placement is tried then.
    """
    few = len(problem.costs.layers) <= RULE.few_layers
    rules = [placed[0].schedule for placed in _placements(problem)]
    return order_floors(problem, rules if few else rules[:1])


def _eager_may_win(problem: Problem, candidates: Sequence[RuledPlan]) -> bool:
    """Tells whether 1F1B with eager forwards, which hide transfers, may beat all candidates."""
    if problem.peer == INFINITE:
        return False
    if problem.peer_uses_host:  # the seconds of candidates leave out waits for shared links
        return True
    least_s = lower_bound(replace(problem, schedule=EAGER)) * (1 - problem.lent)
    return least_s < min((one.step_s for one in candidates), default=float("inf"))


def _from_rival(
    placements: Sequence[Placement],
    rival: RuledPlan,
) -> Iterator[RuledPlan]:
    """Yields plans with a rival's cuts in searched orders; fates that swap are chosen again."""
    problem = rival.problem
    decision = rival.decision
    schedule = problem.schedule
    for placed, fates in placements:
        rule = placed[0].schedule
        if (rule.chunks, rule.vee) != (schedule.chunks, schedule.vee):
            continue
        stages = evaluate_decision(problem, decision).stages
        swaps = any(stage.held.swapped for stage in stages)
        plain = fates.fastest(problem, decision.bounds) if swaps else decision
        if plain is not None:
            yield from _listed(RuledPlan.of(placed[0], plain, fates))


def _swapping(one: RuledPlan) -> Iterator[RuledPlan]:
    """Yields the candidate with new fates, which may swap and which only the simulator can time."""
    problem = one.listed
    if problem.memory_limit_bytes is not None:
        fates = DeviceFates.of(crowded(problem), swaps=True)
        decision = fates.fastest(problem, one.decision.bounds)
        if decision is not None and decision != one.decision:
            yield replace(one, decision=decision)
