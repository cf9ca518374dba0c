"""Explains in words why each place of a pipeline has its number of devices.

A place is a position along the pipeline; its devices are replicas, which share each micro-batch. A
shape says which devices each place has.
"""

from collections.abc import Mapping
from dataclasses import replace

from jvpipe.planners.joint.rough_plan import RoughPlan, kept_or_again
from jvpipe.planners.model.problem import Decision, Problem, with_entry
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.model.stage_cost import Stages, evaluate_decision, keeps_limits
from jvpipe.planners.model.stage_simulation import simulated_bubble_fraction, simulated_step_s


def shape_words(problem: Problem) -> str:
    """Says in words what shape a problem has."""
    shape = pipeline_shape(problem)
    counts = ":".join(map(str, shape.replicas))
    match shape.kind:
        case "straight" if problem.stages > problem.devices:
            return f"straight, {problem.stages} stages on {problem.devices} devices"
        case "straight":
            return f"straight, {problem.stages} stages of one device"
        case "data parallel":
            some = "1 device" if counts == "1" else f"{counts} devices"
            return f"data parallel, {some} for all layers"
        case kind:
            return f"{kind}, {counts} devices"


def pipeline_shape(problem: Problem, size: int = 1) -> Shape:
    """Returns the shape of a problem whose micro-batches have `size` examples.

    Args:
        problem: the problem, with the devices of each place.
        size: the examples of a micro-batch.
    """
    return Shape(tuple(group.devices for group in problem.at_places), size)


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
    lines = _replica_reasons(shapes, problem, decision, best_s)
    for plan in sorted(others, key=lambda plan: plan.step_s):
        stages = evaluate_decision(plan.problem, plan.decision).stages
        lines.append(
            f"{shape_words(plan.problem)}, micro-batches of {plan.shape.size}: "
            f"{1e3 * plan.step_s:.2f} ms, {plan.step_s / best_s:.2f} times as long: "
            f"{_not_work(shapes, plan.problem, stages)}"
        )
    return lines


def _replica_reasons(
    shapes: Shapes,
    problem: Problem,
    decision: Decision,
    best_s: float,
) -> list[str]:
    """Says for each place of several devices what would happen with one device fewer.

    Args:
        shapes: the possible shapes.
        problem: the problem of the shape that was chosen.
        decision: the cuts and fates that were chosen for it.
        best_s: the simulated seconds of a step of this decision.
    """
    reasons = []
    shape = pipeline_shape(problem, shapes.batch // problem.microbatches)
    for p, devices in enumerate(shape.places):
        fewer = len(devices) - 1
        if not fewer:
            continue
        # The cuts stay. Fates are decided again, but only roughly: a stage keeps everything or
        # recomputes everything. A full search for each place would take as long as planning.
        places = with_entry(shape.places, p, devices[:-1])
        without = shapes.problem(replace(shape, places=places))
        evaluation = evaluate_decision(without, kept_or_again(without, decision.bounds))
        has = f"{_stages_at(problem, p)} {fewer + 1} devices"
        if not keeps_limits(without, evaluation):
            reasons.append(f"{has} because with {fewer} it would not keep the limit")
            continue
        step_s = simulated_step_s(without, evaluation.stages)
        would = f"with {fewer} a step would take {1e3 * step_s:.2f} ms"
        # If the user has fixed the number of devices, fewer devices may be as fast.
        is_reason = step_s > best_s
        reasons.append(f"{has} because {would}" if is_reason else f"{has}; {would}, not longer")
    return reasons


def _stages_at(problem: Problem, place: int) -> str:
    """Names the stages at a place as the subject of a sentence, such as "stages 0 and 2 have"."""
    *others, last = (str(s) for s, at in enumerate(problem.places) if at == place)
    return f"stages {', '.join(others)} and {last} have" if others else f"stage {last} has"


def _not_work(
    shapes: Shapes,
    problem: Problem,
    stages: Stages,
) -> str:
    """Says how much of a step is overhead: the longest all-reduce, and idle time."""
    longest_s = max(stage.reduce_s for stage in stages)
    idle = simulated_bubble_fraction(problem, stages, shapes.devices)
    reduced = f"all-reduces of up to {1e3 * longest_s:.2f} ms, " if longest_s else ""
    return f"{reduced}{idle:.1%} idle"
