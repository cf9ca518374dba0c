"""Cuts and fates for a rule of several chunks per device, or of split backwards: of many, those of the fastest step.

begin       cuts of equal work; those of the surrogate, which knows the links; those of the best plan without a limit
then        bounds of the best move while the clock is faster, then while the simulator is; fates follow
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, islice

import numpy as np
from jaxtyping import Float

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import RULE
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_cuts import busiest_s, moved_bounds, shifted_bounds
from jvpipe.planners.joint.order_loads import Known, Loads, Order, Step, lists_of, order_of
from jvpipe.planners.joint.planner import crowded, jvpipe
from jvpipe.planners.model.even import balanced
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts, Segments
from jvpipe.planners.model.stage_cost import evaluate, keeps_limits
from jvpipe.planners.model.unfolded import on_devices
from jvpipe.schedules.auto import given, lines_of
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


@dataclass(frozen=True)
class Candidate:
    """A plan with an order of tasks, where both come from, and the clock's seconds.

    `fates` chooses those of other cuts under its placement.
    """

    problem: Problem
    fates: DeviceFates
    decision: Decision
    loads: Loads
    order: Order
    family: str
    step_s: float


def under_rule(problem: Problem, begin: Sequence[Decision] = ()) -> Decision:
    """Makes the decision of the fastest simulated step that is found, under a rule that the problem's schedule states.

    Args:
        problem: what is to be planned.
        begin: plans of this problem that keep the limits, of which a search may begin.

    Raises:
        Infeasible: nothing fits; with the smallest limit that would do.
    """
    if problem.schedule.chunks == 1 and not problem.splits:
        return jvpipe(problem, begin=begin)
    ways, first = _ways(problem), first_cuts(problem, Segments(problem).cuts)
    if problem.memory_limit_bytes is not None:
        first.append(under_rule(problem.unlimited).bounds)
    fated = [each.fastest(problem, bounds) for bounds in first for each in ways]
    every = dict.fromkeys([*filter(None, fated), *_asked(problem)])
    step_s = cache(partial(_step_s, problem))
    best = sorted((one for one in every if step_s(one) < np.inf), key=step_s)[: RULE.moved]
    if not best:
        emptier = (b for bounds in first for b in _emptier(problem, bounds, ways[-1]))
        fitting = (one for b in emptier for each in ways if (one := each.fastest(problem, b)))
        best = sorted((one for one in fitting if step_s(one) < np.inf), key=step_s)[: RULE.moved]
    if not best:
        return on_devices(jvpipe)(problem)  # which says what would do
    moved = (
        with_moved_bounds(one, RULE.moved_tasks).decision
        for decision in best
        for one in ruled(problem, decision, ways[0])
    )
    ranked = {one.bounds: one for one in sorted([*moved, *best], key=step_s, reverse=True)}
    climbed = (
        with_simulated_moves(problem, one, RULE.simulated_tasks, ways)
        for one in list(ranked.values())[-RULE.climbed :]
    )
    return min(climbed, key=step_s)


def _ways(problem: Problem) -> list[DeviceFates]:
    """Prepares fates without swaps, and where something can be swapped with them."""
    plain = DeviceFates.of(problem)
    if problem.memory_limit_bytes is None:
        return [plain]
    swapping = DeviceFates.of(crowded(problem), swaps=True)
    return [plain, swapping] if swapping.pricing.choices.swapped_bytes.any() else [plain]


def with_simulated_moves(
    problem: Problem, decision: Decision, tasks: int, ways: Sequence[DeviceFates]
) -> Decision:
    """Moves bounds as long as the simulated step takes less: near ones first, then those that shift stages.

    Under a limit the fates of the stages that change are chosen again.

    Args:
        problem: whose schedule, links and limits count.
        decision: to begin with; it keeps the limits.
        tasks: how many are simulated at most.
        ways: to choose fates.
    """
    tries = tasks // sum(map(len, problem.schedule.tasks(problem.devices, problem.microbatches)))
    best, best_s, before = decision, _step_s(problem, decision), None
    while before is not best:
        before = best
        for some in _neighbours(problem, before.bounds):
            every = (x for bounds in some for x in _refitted(problem, before, bounds, ways))
            for moved in islice(every, max(tries, 0)):
                tries -= 1
                if (step_s := _step_s(problem, moved)) < best_s:
                    best, best_s = moved, step_s
            if best is not before or tries <= 0:
                break
    return best


def _neighbours(problem: Problem, bounds: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yields bounds with one or two moved by a few places; then those that are shifted, one at a time."""
    cuts = Segments(problem).cuts
    yield [one for run in (1, 2) for one in moved_bounds(bounds, cuts, run, RULE.places)]
    yield from ([one] for one in shifted_bounds(problem, bounds, cuts, layer_s(problem)))


def first_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists cuts to begin with: of equal work, and where sending takes time those of the surrogate.

    Args:
        problem: whose stages and links count.
        cuts: where a stage may begin or end.
    """
    begin = [balanced(problem, cuts, layer_s(problem))]
    if problem.peer != INFINITE:
        begin.append(on_devices(partial(jvpipe, refine=False))(problem.unlimited).bounds)
    return list(dict.fromkeys(begin))


def all_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists all cuts, those whose busiest device works least first.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end.
    """
    first, *inner, last = cuts.tolist()
    every = [(first, *some, last) for some in combinations(inner, problem.stages - 1)]
    return sorted(every, key=partial(busiest_s, problem, layer_s(problem)))


def _emptier(
    problem: Problem, bounds: tuple[int, ...], fates: DeviceFates
) -> Iterator[tuple[int, ...]]:
    """Yields bounds under which the fullest device holds less and less, if layers leave as little as they can."""
    cuts, before = Segments(problem).cuts, None

    def held_bytes(bounds: tuple[int, ...]) -> int:
        return evaluate(problem, fates.emptiest(problem, bounds)).limit_bytes

    while before != bounds:
        before = bounds
        bounds = min([before, *moved_bounds(before, cuts, most=RULE.places)], key=held_bytes)
        yield bounds


def _asked(problem: Problem) -> Iterator[Decision]:
    """Yields the plan of a device for every stage, where everything may be kept."""
    if problem.memory_limit_bytes is None:
        refine = len(problem.costs.layers) <= RULE.refined_layers
        yield on_devices(partial(jvpipe, refine=refine))(problem)


def _step_s(problem: Problem, decision: Decision) -> float:
    """The simulated seconds of a step; infinite where a limit is not kept."""
    evaluation = evaluate(problem, decision)
    return (
        simulated_step_s(problem, evaluation.stages)
        if keeps_limits(problem, evaluation)
        else np.inf
    )


def layer_s(problem: Problem) -> Float[np.ndarray, " layers"]:
    """Returns the seconds of each layer's forward and backward."""
    return np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])


def ruled(problem: Problem, decision: Decision, fates: DeviceFates) -> Iterator[Candidate]:
    """Yields the rule's own order.

    Args:
        problem: whose schedule is the rule.
        decision: the plan.
        fates: for other cuts.
    """
    loads = Loads.of(problem, decision)
    one = Candidate(problem, fates, decision, loads, [], problem.schedule.name, 0.0)
    yield from fitting(one, order_of(problem.schedule.tasks(problem.devices, problem.microbatches)))


def fitting(one: Candidate, order: Order, family: str = "") -> Iterator[Candidate]:
    """Yields a candidate with another order, if that fits; backwards of stages that cannot be split become whole.

    Args:
        one: whose plan counts.
        order: of the tasks.
        family: where the order comes from, if not from where that of the candidate did.
    """
    loads = one.loads
    if not all(loads.splits):
        order = [_whole_where_not_split(steps, loads.splits) for steps in order]
    if loads.fits(order):
        step_s = Course(loads, order).step_s
        if np.isfinite(step_s):
            yield replace(one, order=order, family=family or one.family, step_s=step_s)


def _whole_where_not_split(steps: Sequence[Step], splits: Sequence[bool]) -> list[Step]:
    """A device's steps with whole backwards for the stages that cannot be split."""
    halves = {Kind.I: Kind.B}
    return [
        (kind if splits[s] else halves.get(kind, kind), s, m)
        for kind, s, m in steps
        if kind is not Kind.W or splits[s]
    ]


def with_moved_bounds(best: Candidate, tasks: int) -> Candidate:
    """The candidate with bounds moved, one place at a time, while that is faster and fits, and so many are clocked.

    Under a limit fates are chosen again, for what the order has in flight.
    """
    cuts = Segments(replace(best.problem, schedule=ONE_F_ONE_B, stages=1, groups=())).cuts
    tries = tasks // sum(map(len, best.order))
    if best.problem.memory_limit_bytes is not None:
        tries //= RULE.fate_tasks * max(1, len(best.decision.choices) // RULE.fated_layers)
    own = replace(best.problem, schedule=given(lines_of(lists_of(best.order))))
    before, ways, clock = None, [best.fates], _Clock(best)
    for moved in _refitted(own, best.decision, best.decision.bounds, ways):
        best = clock.faster(moved) or best
    while before is not best and tries > 0:
        before = best
        for bounds in moved_bounds(best.decision.bounds, cuts):
            if tries <= 0:
                break
            if sum(a != b for a, b in zip(bounds, best.decision.bounds, strict=True)) > 1:
                continue  # the best is another one by now
            tries -= 1
            for moved in _refitted(own, best.decision, bounds, ways):
                best = clock.faster(moved) or best
    return best


class _Clock:
    """Clocks the order of the best candidate so far for other plans."""

    def __init__(self, best: Candidate) -> None:
        self.best, self.known, self.course = best, Known(), Course(best.loads, best.order)

    def faster(self, decision: Decision) -> Candidate | None:
        """The best candidate with another plan, if that fits and is faster."""
        best = self.best
        loads = Loads.of(best.problem, decision, self.known)
        if loads.bound_s() >= best.step_s:
            return None
        if loads.splits != best.loads.splits:
            better = next(fitting(replace(best, decision=decision, loads=loads), best.order), None)
            if better is None or better.step_s >= best.step_s:
                return None
            self.best, self.course = better, Course(better.loads, better.order)
            return better
        if not loads.fits(best.order):
            return None
        self.course.take(loads, best.step_s)
        if self.course.step_s >= best.step_s:
            return None
        self.best = replace(best, decision=decision, loads=loads, step_s=self.course.step_s)
        return self.best


def _refitted(
    own: Problem, begin: Decision, bounds: tuple[int, ...], ways: Sequence[DeviceFates]
) -> Iterator[Decision]:
    """Yields plans with these bounds, fates chosen again in each way where there is a limit."""
    if own.memory_limit_bytes is None:
        yield replace(begin, bounds=bounds)
        return
    every = (fates.fastest(own, bounds) for fates in ways)
    yield from dict.fromkeys(one for one in every if one)
