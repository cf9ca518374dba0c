"""Defines a planner's answer, a plan or the reason why there is none, and ranks several answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jvpipe.ir.compiled_stage import CompiledStage
from jvpipe.ir.plan import Plan
from jvpipe.planners.joint.rough_plan import RoughPlan
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import Evaluation, needed_bytes
from jvpipe.planners.model.stage_simulation import simulated_step_s


@dataclass(frozen=True)
class Answer:
    """A planner's answer: a decision with its evaluation, or the reason why there is none.

    Attributes:
        planner: the planner's name.
        planning_s: how long planning took.
        decision: the cuts and fates; None if no plan was found.
        evaluation: the decision's seconds and bytes; None if no plan was found.
        infeasible: why no plan was found, and a limit that would suffice; None if a plan was found.
        splits: the places at which layers are cut in two, as in `Plan.splits`.
        plan: the decision as a plan.
        kinds: for each kind of shape (`Shape.kind`), the fastest rough plan that was found; empty
            unless the planner also decided how many devices each stage has.
        compiled: what the hardware's compiler reports about each stage, if it was asked.
        state_s: the seconds per step in which the optimizer's state is copied from the host and
            back; the copies are assumed not to overlap with any other work.
    """

    planner: str
    planning_s: float
    decision: Decision | None = None
    evaluation: Evaluation | None = None
    infeasible: Infeasible | None = None
    splits: tuple[int, ...] = ()
    plan: Plan | None = None
    kinds: Mapping[str, RoughPlan] = field(default_factory=dict)
    compiled: tuple[CompiledStage, ...] = ()
    state_s: float = 0.0

    def fits(self, problem: Problem) -> bool:
        """Tells whether the answer has a plan within the devices' limits; ignores the host's."""
        limit = problem.memory_limit_bytes
        return self.evaluation is not None and (
            limit is None or self.evaluation.limit_bytes <= limit
        )

    def step_s(self, problem: Problem) -> float:
        """Returns the seconds of a simulated step; infinite without a plan."""
        # An infinite step is slower than any other step, so comparisons need no special case.
        if self.evaluation is None:
            return math.inf
        return simulated_step_s(problem, self.evaluation.stages) + self.state_s


def best_first(problem: Problem, answers: Sequence[Answer]) -> list[Answer]:
    """Sorts answers: first plans that fit, then plans over the limit, then answers without a plan.

    Within each of these groups, faster plans come first.

    Args:
        problem: the problem that was asked.
        answers: the answers of the planners that were asked.
    """

    def rank(answer: Answer) -> tuple[bool, float]:
        # The seconds of equally fast plans may differ in their last digits. Rounding makes them
        # equal, and `sorted` leaves equals in the order in which the planners were asked.
        return not answer.fits(problem), float(f"{answer.step_s(problem):.9g}")

    return sorted(answers, key=rank)


def why_not(problem: Problem, answers: Sequence[Answer]) -> str:
    """Says why none of the answers fits, and which limit would suffice, if a planner named one.

    Args:
        problem: the problem that was asked.
        answers: answers of which none fits.
    """
    nearest = [answer.infeasible for answer in answers if answer.infeasible is not None]
    if nearest:
        return str(min(nearest, key=lambda infeasible: infeasible.smallest_limit_bytes))
    # Every planner made a plan although it exceeds the limit, so none of them reads the limit.
    first = answers[0]
    assert first.evaluation is not None, "there is a plan, or a reason why there is none"
    held_bytes = first.evaluation.device_bytes
    place = int(np.argmax(needed_bytes(problem, held_bytes)))
    where = "device" if problem.schedule.chunks > 1 else "stage"
    return (
        f"{first.planner} looks at no limit: its plan takes {held_bytes[place]} bytes on {where} "
        f"{place}, and the limit is {problem.limit_of(place)}; raise the limit, or use a planner "
        "that keeps it, such as jvpipe"
    )


def smallest_limit_bytes(answers: Sequence[Answer]) -> int:
    """Returns the smallest limit under which one of the planners is known to have a plan."""
    refused = [x.infeasible.smallest_limit_bytes for x in answers if x.infeasible is not None]
    planned = [x.evaluation.limit_bytes for x in answers if x.evaluation is not None]
    return min(refused + planned)
