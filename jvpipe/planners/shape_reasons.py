"""Explains in words why each place of a pipeline has its number of devices.

A place is a position along the pipeline; its devices are replicas, which share each micro-batch. A
shape says which devices each place has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jvpipe.planners.joint.rough_plan import RoughPlan, kept_or_again
from jvpipe.planners.model.problem import Decision, Problem, with_entry
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, keeps_limits
from jvpipe.planners.model.stage_simulation import simulated_bubble_fraction, simulated_step_s


def shape_words(problem: Problem) -> str:
    """Says in words what shape a problem has."""
    shape = pipeline_shape(problem)
    counts = ":".join(map(str, shape.replicas))
    match shape.kind:
        case "straight":
            return f"straight, {len(shape.places)} stages of one device"
        case "data parallel":
            return f"data parallel, {counts} devices for all layers"
        case kind:
            return f"{kind}, {counts} devices"


def pipeline_shape(problem: Problem, size: int = 1) -> Shape:
    """Returns the shape of a problem whose micro-batches have `size` examples.

    Args:
        problem: the problem, with the devices of each place.
        size: the examples of a micro-batch.
    """
    places = dict(zip(problem.places, problem.where, strict=True))
    return Shape(tuple(places[place] for place in range(problem.devices)), size)


def shape_reasons(
    shapes: Shapes,
    problem: Problem,
    decision: Decision,
    kinds: Mapping[str, RoughPlan],
) -> list[str]:
    """Explains why places have several devices, and how slow the best plans of other shapes are.

    Args:
        shapes: the possible shapes.
        problem: the problem of the shape that was chosen.
        decision: the cuts and fates that were chosen for it.
        kinds: the best plan of each kind of shape that was tried.

    Returns:
        The lines of the explanation.
    """
    best_s = simulated_step_s(problem, evaluate_decision(problem, decision).stages)
    present_kind = pipeline_shape(problem).kind
    others = [plan for kind, plan in kinds.items() if kind != present_kind]
    lines = []
    for plan in sorted(others, key=lambda plan: plan.step_s):
        stages = evaluate_decision(plan.problem, plan.decision).stages
        lines.append(
            f"{shape_words(plan.problem)}, micro-batches of {plan.shape.size}: "
            f"{1e3 * plan.step_s:.2f} ms, {plan.step_s / best_s:.2f} times as long: "
            f"{_not_work(shapes, plan.problem, stages)}"
        )
    return [*_replica_reasons(shapes, problem, decision), *lines]


def _replica_reasons(
    shapes: Shapes,
    problem: Problem,
    decision: Decision,
) -> list[str]:
    """Says for each place of several devices what would happen with one device fewer."""
    reasons = []
    shape = pipeline_shape(problem, shapes.batch // problem.microbatches)
    for p, devices in enumerate(shape.places):
        count = len(devices)
        if count == 1:
            continue
        # The cuts stay, and only fates are decided again, roughly: a full search for each place would
        # take as long as planning.
        fewer = with_entry(shape.places, p, devices[:-1])
        without = shapes.problem(replace(shape, places=fewer))
        rough = kept_or_again(without, decision.bounds)
        evaluation = evaluate_decision(without, rough)
        why = "it would not keep the limit"
        if keeps_limits(without, evaluation):
            step_s = simulated_step_s(without, evaluation.stages)
            why = f"a step would take {1e3 * step_s:.2f} ms"
        reasons.append(f"stage {p} has {count} devices because with {count - 1} {why}")
    return reasons


def _not_work(
    shapes: Shapes,
    problem: Problem,
    stages: Sequence[StageCost],
) -> str:
    """Says how much of a step is overhead: the longest all-reduce, and idle time."""
    longest_s = max(stage.reduce_s for stage in stages)
    idle = simulated_bubble_fraction(problem, stages, shapes.devices)
    reduced = f"all-reduces of up to {1e3 * longest_s:.2f} ms, " if longest_s else ""
    return f"{reduced}{idle:.1%} idle"
