"""Refines many candidates, which are plans with an order of tasks, to a few fast ones.

The bounds of a plan are the layers at which its stages begin and end. A rule is a schedule that
gives an order of tasks. The family of a candidate is the rule or the search that made its order.

Two searches take turns. A climb changes the order and keeps the plan (`order_climb.py`). The other
search keeps the order, moves bounds and chooses new fates for what that order has in flight
(`climb.py`). Each search may find a gain that the other one has made possible.

    1. Climb    from all candidates that are nearly as fast as the fastest.
    2. Move     the bounds of the best candidate of each of the fastest families.
    3. Climb    from the best of what 1 and 2 found. These are few, so each may make more moves.
    4. Move     the bounds of the best again, and climb from what this finds.

Many candidates enter the first climb because a slower candidate may end up faster, especially if
memory is scarce. `RefineEffort` and `effort.py` set how much is tried, and may be changed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.effort import PLAN, RULE
from jvpipe.planners.joint.order_climb import climbed
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.joint.rule_search import RuledPlan, fitting

CLIMBED = ", climbed"


@dataclass(frozen=True)
class RefineEffort:
    """How hard to search for a faster order: numbers that trade planning time for faster steps.

    On chains of 4 to 7 layers under a limit, more effort found nothing faster: three times
    `climbed_tasks`, four times `moves`, and a `near` that leaves twice as many candidates
    (tests/planners/joint/exact_plans.py). On larger models the numbers were not measured.

    Attributes:
        near: the first climb starts from candidates that take at most this many times as long as
            the fastest.
        moved_near: like `near`, for the candidates whose bounds are moved.
        moved: the number of families in step 2. For models of few layers, step 2 also moves the
            bounds of this number of other candidates.
        rules_moved: like `moved`, for candidates whose order is a rule's own order.
        kept: how many plans the climb of step 3 starts from.
        left: how many plans have their bounds moved in step 4.
        climbed_tasks: how many tasks each climb may time, over all candidates that it starts from.
        moves: the most moves from one candidate in a climb.
    """

    near: float = 1.15
    moved_near: float = 1.12
    moved: int = 3
    rules_moved: int = 6
    kept: int = 18
    left: int = 6
    climbed_tasks: int = 300_000
    moves: int = 150


EFFORT = RefineEffort()


def refined(candidates: Sequence[RuledPlan]) -> list[RuledPlan]:
    """Returns the best plans and orders found from candidates that fit, the fastest first.

    The results fit too.
    """
    # Candidates with the same plan and the same seconds are climbed from once.
    distinct = {(one.decision, one.problem.schedule.vee, one.step_s): one for one in candidates}
    some = _climbed(_near(list(distinct.values()), EFFORT.near))
    best = _of_families(some, EFFORT.moved)
    # A candidate in its rule's own order has the name of the rule as its family.
    own_order = [one for one in candidates if one.family == one.problem.schedule.name]
    best += [one for one in _of_families(own_order, EFFORT.rules_moved) if one not in best]
    some = _best_of([*some, *_moved(best)])[: EFFORT.kept]
    some = _best_of([*some, *_climbed(some)])
    return _best_of([*some, *_climbed(list(_moved(some[: EFFORT.left])))])


def _of_families(candidates: Sequence[RuledPlan], count: int) -> list[RuledPlan]:
    """Lists the best of each of `count` families; for models of few layers, also `count` others."""
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


def _moved(candidates: Iterable[RuledPlan]) -> Iterator[RuledPlan]:
    """Yields candidates in the same order with better bounds and fates, if any are found."""
    for one in candidates:
        problem = one.listed
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
    """Keeps the fastest order of each plan (cuts, fates and placement), the fastest plan first."""
    best: dict[object, RuledPlan] = {}
    for one in sorted(candidates, key=_step_s):
        best.setdefault((one.decision, one.problem.schedule.vee), one)
    return list(best.values())


def _climbed(candidates: Sequence[RuledPlan]) -> list[RuledPlan]:
    """Climbs from each candidate; each gets more moves if there are fewer candidates."""
    tasks = sum(len(steps) for one in candidates for steps in one.order)
    moves = min(EFFORT.moves, EFFORT.climbed_tasks // max(1, tasks))
    return [_fitting_climb(one, moves) for one in candidates]


def _fitting_climb(one: RuledPlan, moves: int) -> RuledPlan:
    """Climbs from a candidate; returns the candidate itself if the result does not fit.

    The climb works with the room for micro-batches in flight under the candidate's own order. Its
    result may have less room, because a stage may hold more values that arrive before its forward
    (`Loads.early`).
    """
    roomy = replace(one.loads, room_bytes=one.loads.rooms_bytes(one.order))
    order = climbed(roomy, one.order, moves)
    if order == one.order or not one.loads.fits(order):
        return one
    return replace(
        one,
        order=order,
        family=one.family.removesuffix(CLIMBED) + CLIMBED,
        step_s=Course(one.loads, order).step_s,
    )
