"""What the planner of replicated stages answers, in words and as JSON; `tables.py` has the table."""

from dataclasses import replace
from typing import Any

from jvpipe.ir.plan import Plan
from jvpipe.planners.model.replicas_answer import ReplicaAnswer, Simulated
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


def idle_fraction(problem: ReplicaProblem, simulated: Simulated) -> float:
    """The idle share of all devices there are in a simulated step, those that are left out among them.

    Args:
        problem: that was asked.
        simulated: a plan.
    """
    worked = (
        r * (x.forward_s + x.backward_s)
        for r, x in zip(simulated.plan.replicas, simulated.stages, strict=True)
    )
    busy_s = problem.batch // simulated.plan.size * sum(worked)
    return 1.0 - busy_s / (problem.devices * simulated.step_s) if simulated.step_s else 0.0


def reduce_s(simulated: Simulated) -> float:
    """The seconds of the longest all-reduce of a step that no backward hides."""
    return max(stage.reduce_s for stage in simulated.stages)


def in_flight(problem: ReplicaProblem, simulated: Simulated) -> tuple[int, ...]:
    """The most micro-batches between their forward and their backward, on each stage."""
    return ONE_F_ONE_B.in_flight(simulated.plan.stages, problem.batch // simulated.plan.size)


def stages_json(problem: ReplicaProblem, simulated: Simulated, plan: Plan) -> list[dict[str, Any]]:
    """Writes the stages in the form of `--json`.

    Args:
        problem: that was asked.
        simulated: the answer.
        plan: the same, with names.
    """
    every = zip(plan.stages, simulated.stages, in_flight(problem, simulated), strict=True)
    return [
        {
            "layers": list(stage.layers),
            "devices": list(stage.devices),
            "replicas": len(stage.devices),
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s - cost.recompute_s,
            "recompute_s": cost.recompute_s,
            "swap_s": 0.0,
            "comm_s": cost.comm_s,
            "reduce_s": cost.reduce_s,
            "peak_bytes": cost.peak_bytes,
            "in_flight": flying,
            "fates": dict(stage.fates),
        }
        for stage, cost, flying in every
    ]


def as_json(problem: ReplicaProblem, answer: ReplicaAnswer, plan: Plan) -> dict[str, Any]:
    """Writes an answer in the form of `--json`, with the best plan of each shape.

    Args:
        problem: that was asked.
        answer: to it.
        plan: the best one, with names.
    """
    best = answer.best
    shapes = [
        {
            "shape": shape,
            "replicas": list(simulated.plan.replicas),
            "layers_per_stage": list(simulated.plan.layers),
            "microbatches": problem.batch // simulated.plan.size,
            "step_s": simulated.step_s,
        }
        for shape, simulated in sorted(answer.shapes.items(), key=lambda item: item[1].step_s)
    ]
    return {
        "planner": plan.planner,
        "schedule": plan.schedule,
        "feasible": True,
        "devices": problem.devices,
        "microbatches": problem.batch // best.plan.size,
        "stages": stages_json(problem, best, plan),
        "bottleneck_s": max(stage.seconds for stage in best.stages),
        "step_s": best.step_s,
        "lower_bound_s": answer.bound_s,
        "bubble_fraction": idle_fraction(problem, best),
        "planning_s": answer.planning_s,
        "splits": list(plan.splits),
        "tasks": [],
        "shapes": shapes,
    }


def summary(problem: ReplicaProblem, answer: ReplicaAnswer) -> str:
    """Says the best plan's shape, its step and how far from the best that is at most.

    Args:
        problem: that was asked.
        answer: to it.
    """
    best, count = answer.best, problem.batch // answer.best.plan.size
    return (
        f"planner {answer.planner}, schedule 1f1b, on {problem.devices} devices {shape_words(best)}, {count} "
        f"micro-batch{'es' * (count > 1)} of {best.plan.size}: step {1e3 * best.step_s:.2f} ms simulated (no plan is "
        f"under {1e3 * answer.bound_s:.2f}: at most {answer.gap:.1%} above the best), {_parts(problem, best)}, "
        f"planned in {answer.planning_s:.2f} s"
    )


def reasons(problem: ReplicaProblem, answer: ReplicaAnswer) -> list[str]:
    """Says, a line each, why stages have as many devices as they have, and what the best of other shapes take.

    Args:
        problem: that was asked.
        answer: to it.
    """
    others = sorted(
        (x for x in answer.shapes.values() if x is not answer.best), key=lambda x: x.step_s
    )
    lines = [
        f"{shape_words(simulated)}, micro-batches of {simulated.plan.size}: {1e3 * simulated.step_s:.2f} ms, "
        f"{simulated.step_s / answer.best.step_s:.2f} times as long: {_parts(problem, simulated)}"
        for simulated in others
    ]
    return [*_replica_reasons(problem, answer.best), *lines]


def _replica_reasons(problem: ReplicaProblem, best: Simulated) -> list[str]:
    """Says of each replicated stage what one device less would do."""
    tables, told = Tables(problem), []
    for s, places in enumerate(best.plan.places):
        if len(places) > 1:
            fewer = (*best.plan.places[:s], places[:-1], *best.plan.places[s + 1 :])
            plan = replace(best.plan, places=fewer)
            stages = tables.stages(plan)
            step_s = simulated_s(problem, plan, stages)
            why = (
                f"a step would take {1e3 * step_s:.2f} ms"
                if tables.fits(stages)
                else "it would not keep the limit"
            )
            told.append(f"stage {s} has {len(places)} devices because with {len(places) - 1} {why}")
    return told


def shape_words(simulated: Simulated) -> str:
    """Says how many devices the stages of a plan have."""
    match simulated.plan.shape:
        case "straight":
            return f"straight, {simulated.plan.stages} stages of one device"
        case "data parallel":
            return f"data parallel, {simulated.plan.replicas[0]} devices for all layers"
        case shape:
            return f"{shape}, {':'.join(map(str, simulated.plan.replicas))} devices"


def _parts(problem: ReplicaProblem, simulated: Simulated) -> str:
    """What of a step is not work."""
    reduced = (
        f"all-reduces of up to {1e3 * reduce_s(simulated):.2f} ms, " if reduce_s(simulated) else ""
    )
    return f"{reduced}{idle_fraction(problem, simulated):.1%} idle"
