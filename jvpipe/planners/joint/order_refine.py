"""Refines many candidate orders to a few fast ones, by climbs from all and more from the best.

A candidate is a plan with an order of tasks. A candidate that starts slower than others may end
faster, above all if memory is scarce. So climbs begin from all candidates that are near the
fastest. The best results are climbed from again with more moves, and then their bounds and fates
move too, under what their orders have in flight by then.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.effort import PLAN, RULE
from jvpipe.planners.joint.order_climb import climbed
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_loads import Loads, order_lists
from jvpipe.planners.joint.rule_search import RuledPlan, fitting
from jvpipe.schedules.auto import given_lists, lines_of

CLIMBED = ", climbed"


@dataclass(frozen=True)
class RefineEffort:
    """How hard to search for a faster order: numbers that trade planning time for faster steps.

    On chains of 4 to 7 layers under a limit, three times `climbed_tasks`, four times `moves` and a
    `near` that leaves twice as many candidates found nothing faster
    (tests/planners/joint/exact_plans.py). For larger models they were not measured one by one.

    Attributes:
        near: a candidate that takes at most this many times the fastest is climbed from.
        moved_near: the same for candidates whose bounds are moved.
        moved: how many families have bounds moved after a climb; twice as many candidates for
            models of few layers.
        rules_moved: how many rules have bounds moved in the rule's own order; twice as many
            candidates for models of few layers.
        kept: how many plans are climbed from next.
        left: how many plans have their bounds moved again.
        climbed_tasks: how many tasks are timed in each round.
        moves: the most moves from one order in a round.
        attempts: how many times an order is climbed from, each time with less room, until the
            result fits.
    """

    near: float = 1.15
    moved_near: float = 1.12
    moved: int = 3
    rules_moved: int = 6
    kept: int = 18
    left: int = 6
    climbed_tasks: int = 300_000
    moves: int = 150
    attempts: int = 3


EFFORT = RefineEffort()


def refined(candidates: Sequence[RuledPlan]) -> list[RuledPlan]:
    """Returns the best plans and orders found from candidates, the fastest first.

    All of them fit.

    Args:
        candidates: to begin with, which must fit.
    """
    # Candidates with the same plan and the same seconds are climbed from once.
    distinct = {(one.decision, one.problem.schedule.vee, one.step_s): one for one in candidates}
    some = _climbed(_near(list(distinct.values()), EFFORT.near))
    best = _of_families(some, EFFORT.moved)
    same_family = [one for one in candidates if one.family == one.problem.schedule.name]
    best += [one for one in _of_families(same_family, EFFORT.rules_moved) if one not in best]
    some = _best_of([*some, *_moved(best)])[: EFFORT.kept]
    some = _best_of([*some, *_climbed(some)])
    return _best_of([*some, *_climbed(_moved(some[: EFFORT.left]))])


def _of_families(candidates: Sequence[RuledPlan], count: int) -> list[RuledPlan]:
    """Lists the best of each family; for models of few layers, also as many other candidates."""
    near = sorted(_near(candidates, EFFORT.moved_near), key=_step_s)
    best = first_of_families(near)[:count]
    are_few = all(len(one.decision.choices) <= RULE.few_layers for one in near)
    if not are_few:
        return best
    others = [one for one in near if one not in best]
    return [*best, *others[:count]]


def first_of_families(candidates: Iterable[RuledPlan]) -> list[RuledPlan]:
    """Lists the first candidate of each family."""
    first: dict[str, RuledPlan] = {}
    for one in candidates:
        first.setdefault(one.family.removesuffix(CLIMBED), one)
    return list(first.values())


def _step_s(one: RuledPlan) -> float:
    return one.step_s


def _near(candidates: Sequence[RuledPlan], near: float) -> list[RuledPlan]:
    """Returns the candidates that take at most `near` times as long as the fastest."""
    fastest_s = min(map(_step_s, candidates), default=0.0)
    return [one for one in candidates if one.step_s <= near * fastest_s]


def _moved(candidates: Sequence[RuledPlan]) -> list[RuledPlan]:
    """Lists the candidates with moved bounds and fates that are faster in the same order."""
    return [moved for one in candidates for moved in _with_moved_bounds(one)]


def _with_moved_bounds(one: RuledPlan) -> Iterator[RuledPlan]:
    lines = lines_of(order_lists(one.order))
    problem = replace(one.problem, schedule=given_lists(lines))
    are_many = len(one.decision.choices) > PLAN.hasty_layers
    is_hasty = are_many and problem.memory_limit_bytes is not None
    ways = [] if is_hasty or one.fates is None else [one.fates]
    climb = Climb(problem, ways, RULE.moved_tasks, places=1)
    decision = climb.climbed(one.decision)
    if decision != one.decision:
        loads = Loads.of(one.problem, decision)
        moved = replace(one, decision=decision, loads=loads)
        yield from fitting(moved, one.order)


def _best_of(candidates: Iterable[RuledPlan]) -> list[RuledPlan]:
    """Returns the fastest order of each plan, the fastest first."""
    best: dict[object, RuledPlan] = {}
    for one in sorted(candidates, key=_step_s):
        best.setdefault((one.decision, one.problem.schedule.vee), one)
    return list(best.values())


def _climbed(candidates: Sequence[RuledPlan]) -> list[RuledPlan]:
    """Climbs from each candidate."""
    tasks = sum(len(steps) for one in candidates for steps in one.order)
    moves = min(EFFORT.moves, EFFORT.climbed_tasks // max(1, tasks))
    return [_fitting_climb(one, moves) for one in candidates]


def _fitting_climb(one: RuledPlan, moves: int) -> RuledPlan:
    """Climbs from a candidate; returns the candidate itself if no result fits."""
    rooms = one.loads.rooms_bytes(one.order)
    # The room depends on the order, because another order may have more early values. If a result
    # is over its own room, the climb is repeated with less room, by the bytes it is over.
    for _ in range(EFFORT.attempts):
        order = climbed(replace(one.loads, room_bytes=tuple(rooms)), one.order, moves)
        if order == one.order:
            return one
        over = one.loads.over_bytes(order)
        if max(over) <= 0:
            return replace(
                one,
                order=order,
                family=one.family.removesuffix(CLIMBED) + CLIMBED,
                step_s=Course(one.loads, order).step_s,
            )
        rooms = [room - max(0.0, more) for room, more in zip(rooms, over, strict=True)]
    return one
