"""Explains an order of tasks: its gain over 1F1B, the time of updates, why steps do not overlap."""

from collections.abc import Sequence
from dataclasses import replace

from jvpipe.planners.joint.ordered_plan import OrderedPlan
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import Evaluation, evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_bubble_fraction, simulated_step_s
from jvpipe.schedules import find_schedule
from jvpipe.util.sizes import format_bytes


def order_reasons(
    problem: Problem,
    decision: Decision,
    cross_layer: Sequence[str],
) -> list[str]:
    """Compares a plan with 1F1B that has no memory limit: seconds, idle time, transfers, bytes.

    The list is empty if there is nothing to compare: the schedule is asynchronous, the pipeline has
    only one place, or the layers' seconds are unknown.

    Args:
        problem: the question that the plan answers, with the plan's order as its schedule.
        decision: the plan's cuts and fates.
        cross_layer: transformations of the optimizer that need a value computed from all layers.
    """
    is_timed = any(layer.forward_s for layer in problem.costs.layers)
    if not problem.schedule.synchronous or problem.devices == 1 or not is_timed:
        return []
    # Without a limit, 1F1B keeps everything. So the comparison shows both what the order gains and
    # what the memory limit costs.
    usual_schedule = find_schedule("1f1b")
    plain = replace(problem.unlimited, stages=problem.devices, schedule=usual_schedule)
    ours = evaluate_decision(problem, decision)
    usual = evaluate_decision(plain, under_rule(plain))
    step_s = simulated_step_s(problem, ours.stages)
    usual_s = simulated_step_s(plain, usual.stages)
    idle = simulated_bubble_fraction(problem, ours.stages)
    usual_idle = simulated_bubble_fraction(plain, usual.stages)
    line = (
        f"simulated, a step takes {1e3 * step_s:.2f} ms, "
        f"{step_s / usual_s:.2f} of 1f1b's where that keeps everything: "
        f"devices are idle for {idle:.0%} of it ({usual_idle:.0%}), "
        f"transfers take {1e3 * _transfer_s(ours):.2f} ms per micro-batch "
        f"({1e3 * _transfer_s(usual):.2f}), "
        f"by the planners' count, the fullest device holds "
        f"{format_bytes(ours.peak_bytes)} ({format_bytes(usual.peak_bytes)})"
    )
    if not cross_layer:
        return [line]
    # If steps overlapped, work of the next step could fill all idle time.
    busy_s = step_s * (1 - idle)
    return [
        line,
        f"steps do not overlap: {', '.join(cross_layer)} needs a value of all layers, "
        "so no update begins before the last backward has ended. "
        f"Without it a step of a long run could come down to some {1e3 * busy_s:.2f} ms",
    ]


def update_reasons(problem: Problem, decision: Decision) -> list[str]:
    """Describes in a line how long a plan's updates take, and how often they run.

    The list is empty if the seconds of updates are unknown.

    Args:
        problem: the question that the plan answers.
        decision: the plan's cuts and fates.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),), update_s=0.5),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("pipedream"), 8)
    >>> update_reasons(problem, Decision.keeping_all([0, 1, 4]))
    ['an update takes 500.00 to 1500.00 ms on a stage, 8 times a step']
    """
    seconds = sorted(stage.update_s for stage in evaluate_decision(problem, decision).stages)
    if not seconds[-1]:
        return []
    often = "once a step" if problem.updates == 1 else f"{problem.updates:g} times a step"
    least, longest = (f"{1e3 * s:.2f}" for s in (seconds[0], seconds[-1]))
    took = longest if least == longest else f"{least} to {longest}"
    return [f"an update takes {took} ms on a stage, {often}"]


def search_reasons(plan: OrderedPlan) -> str:
    """Explains an order that a search found: compares it with a lower bound and usual schedules."""
    rules = sorted(plan.others.items(), key=lambda rule: rule[1])
    beside = ", ".join(f"{name} {seconds / plan.step_s:.3f}" for name, seconds in rules)
    lent = (
        f"; idle devices lend the others {plan.lent:.0%} of their time: "
        "less work is worth more there, and 1f1b is kept where an order gains little"
    )
    return (
        f"the order comes from {plan.family}: {1e3 * plan.step_s:.2f} ms, no order is under "
        f"{1e3 * plan.bound_s:.2f}; beside it the rules take {beside}{lent if plan.lent else ''}"
    )


def _transfer_s(evaluation: Evaluation) -> float:
    """Adds up the seconds of all stages' transfers for one micro-batch."""
    return sum(stage.comm_s for stage in evaluation.stages)
