"""A plan with its own order of tasks, timed by the simulator: the result of `order_search.py`."""

from dataclasses import dataclass, field, replace

from jvpipe.planners.joint.rule_search import RuledPlan
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, keeps_limits
from jvpipe.planners.model.stage_simulation import simulated_bubble_fraction, simulated_step_s
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class OrderedPlan:
    """A plan with its order of tasks, its simulated seconds, and a bound.

    Attributes:
        decision: the cuts and fates.
        schedule: the order of tasks.
        family: the name of the rule or search that the order comes from.
        step_s: the simulated seconds of a step.
        bound_s: no order of the decision's tasks takes fewer seconds.
        worth_s: `step_s` minus the idle time that other devices can use.
        whole: the layers whose backwards could be split but stay whole.
        others: the seconds of the best candidate of each family.
        lent: the fraction of a device's idle time that other devices can use.
    """

    decision: Decision
    schedule: Schedule
    family: str
    step_s: float
    bound_s: float
    worth_s: float
    whole: tuple[int, ...] = ()
    others: dict[str, float] = field(default_factory=dict)
    lent: float = 0.0


def under(problem: Problem, rule: Schedule) -> Problem:
    """Returns the problem under a rule, with as many stages as the rule has on these devices."""
    return replace(problem, stages=rule.stages_on(problem.devices), schedule=rule)


def simulated_plan(one: RuledPlan) -> OrderedPlan | None:
    """Simulates a candidate; None if exact counting shows a device over its limit."""
    problem = one.listed
    evaluation = evaluate_decision(problem, one.decision)
    if not keeps_limits(problem, evaluation):
        return None
    step_s = simulated_step_s(problem, evaluation.stages)
    idle = 0.0
    if problem.lent:  # a device that copies does not lend its time: copies need workers too
        copies_s = problem.microbatches * sum(stage.comm_s for stage in evaluation.stages)
        copying = copies_s / (problem.devices * step_s)
        idle = simulated_bubble_fraction(problem, evaluation.stages) - copying
    return OrderedPlan(
        one.decision,
        problem.schedule,
        one.family,
        step_s,
        one.loads.bound_s(),
        step_s * (1 - problem.lent * max(0.0, idle)),
        lent=problem.lent,
    )
