"""What planners answer, in words and as JSON; `tables.py` has the tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jvpipe.ir.plan import Plan
from jvpipe.planners.joint.rough_plan import RoughPlan
from jvpipe.planners.model.forecast import bubble_fraction, simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import Evaluation, StageCost
from jvpipe.report.shapes import shape_words
from jvpipe.schedules.auto import GivenLists


@dataclass(frozen=True)
class Answer:
    """What a planner says; without a decision, why there is none.

    `kinds` are the best rough plans of each kind of shape, where the shape was decided too.
    """

    planner: str
    planning_s: float
    decision: Decision | None = None
    evaluation: Evaluation | None = None
    infeasible: Infeasible | None = None
    splits: tuple[int, ...] = ()
    plan: Plan | None = None
    kinds: Mapping[str, RoughPlan] = field(default_factory=dict)

    def fits(self, problem: Problem) -> bool:
        """Tells whether there is a plan, and it keeps the limit."""
        limit = problem.memory_limit_bytes
        return self.evaluation is not None and (
            limit is None or self.evaluation.limit_bytes <= limit
        )


def best_first(problem: Problem, answers: Sequence[Answer]) -> list[Answer]:
    """Sorts answers: those that fit, the fastest step first, then plans over the limit, then those without one.

    Of equals, give or take a rounding, the one that is given first comes first.
    """

    def rank(answer: Answer) -> tuple[bool, float]:
        if answer.evaluation is None:
            return True, math.inf
        step_s = simulated_step_s(problem, answer.evaluation.stages)
        return not answer.fits(problem), float(f"{step_s:.9g}")

    return sorted(answers, key=rank)


def _stage_json(cost: StageCost) -> dict[str, Any]:
    """Writes what a stage takes per micro-batch, and what its device holds at most."""
    input_s, weight_s = cost.halves_s
    return {
        "forward_s": cost.forward_s,
        "backward_s": cost.backward_s,
        "recompute_s": cost.recompute_s,
        "swap_s": cost.swap_s,
        "comm_s": cost.comm_s,
        "peak_bytes": cost.peak_bytes,
        "in_flight": cost.in_flight,
        "input_s": input_s,
        "weight_s": weight_s,
        "reduce_s": cost.reduce_s,
    }


def as_json(
    problem: Problem, answer: Answer, bound_s: float, shapes: Shapes | None = None
) -> dict[str, Any]:
    """Writes an answer in the form of `--json`; no plan that keeps the limit is below `bound_s`.

    Args:
        problem: what was asked.
        answer: a planner's.
        bound_s: seconds per step that no plan is below.
        shapes: those of which the problem is one.
    """
    head = {"planner": answer.planner, "schedule": problem.schedule.name}
    if answer.decision is None or answer.evaluation is None:
        assert answer.infeasible is not None
        return head | {
            "feasible": False,
            "reason": str(answer.infeasible),
            "smallest_limit_bytes": answer.infeasible.smallest_limit_bytes,
            "stages": [],
            "planning_s": answer.planning_s,
        }
    costs = problem.costs
    ids = costs.ids or tuple(range(len(costs.layers)))
    plan = answer.plan or answer.decision.plan(problem, answer.planner)
    stages = [
        {
            "layers": list(ids[i:j]),
            "devices": list(stage.devices),
            "replicas": len(stage.devices),
            **_stage_json(cost),
            "fates": dict(stage.fates),
            **({"state_fates": dict(stage.state_fates)} if stage.state_fates else {}),
        }
        for (i, j), stage, cost in zip(
            pairwise(answer.decision.bounds), plan.stages, answer.evaluation.stages, strict=True
        )
    ]
    return head | {
        "feasible": answer.fits(problem),
        "stages": stages,
        "bottleneck_s": answer.evaluation.bottleneck_s,
        "step_s": simulated_step_s(problem, answer.evaluation.stages),
        "lower_bound_s": bound_s if math.isfinite(bound_s) else None,
        "bubble_fraction": bubble_fraction(
            problem, answer.evaluation.stages, shapes and shapes.devices
        ),
        "planning_s": answer.planning_s,
        "splits": list(answer.splits),
        "tasks": list(problem.schedule.lists.lines)
        if isinstance(problem.schedule.lists, GivenLists)
        else [],
        **(_shapes_json(problem, answer, shapes) if shapes else {}),
    }


def _shapes_json(problem: Problem, answer: Answer, shapes: Shapes) -> dict[str, Any]:
    """Writes how many devices and micro-batches there are, and the best plan of each kind of shape."""
    kinds = sorted(answer.kinds.items(), key=lambda item: item[1].step_s)
    return {
        "devices": shapes.devices,
        "microbatches": problem.microbatches,
        "shapes": [
            {
                "shape": kind,
                "replicas": list(plan.shape.replicas),
                "layers_per_stage": [j - i for i, j in pairwise(plan.decision.bounds)],
                "microbatches": plan.problem.microbatches,
                "step_s": plan.step_s,
            }
            for kind, plan in kinds
        ],
    }


def why_not(problem: Problem, answers: Sequence[Answer]) -> str:
    """Says why none of the answers fits, and what would."""
    nearest = [answer.infeasible for answer in answers if answer.infeasible is not None]
    if nearest:
        return str(min(nearest, key=lambda infeasible: infeasible.smallest_limit_bytes))
    first = answers[0]
    assert first.evaluation is not None, "there is a plan, or a reason why there is none"
    stages = first.evaluation.stages
    over = [stage.peak_bytes + problem.less_bytes(s) for s, stage in enumerate(stages)]
    s = over.index(max(over))
    limit = problem.limit_of(problem.places[s])
    return (
        f"{first.planner} looks at no limit: its plan takes {stages[s].peak_bytes} bytes on stage {s}, and "
        f"the limit is {limit}; raise the limit, or use a planner that keeps it, such as jvpipe"
    )


def smallest_limit_bytes(answers: Sequence[Answer]) -> int:
    """A limit that one of the answers would keep."""
    would_do = [
        answer.infeasible.smallest_limit_bytes
        for answer in answers
        if answer.infeasible is not None
    ]
    return min(
        would_do
        + [answer.evaluation.limit_bytes for answer in answers if answer.evaluation is not None]
    )


def summary(problem: Problem, answer: Answer, bound_s: float, shapes: Shapes | None = None) -> str:
    """Says a plan's step, its slowest stage and how idle it is.

    Args:
        problem: what was asked.
        answer: one with a plan.
        bound_s: seconds per step that no plan is below.
        shapes: those of which the problem is one.
    """
    assert answer.evaluation is not None
    stages, m = answer.evaluation.stages, problem.microbatches
    shape = f"on {shapes.devices} devices {shape_words(problem)}, " if shapes else ""
    size = f" of {shapes.batch // m}" if shapes else ""
    reduce_s = max(stage.reduce_s for stage in stages)
    reduced = f"all-reduces of up to {1e3 * reduce_s:.2f} ms, " if reduce_s else ""
    idle = bubble_fraction(problem, stages, shapes and shapes.devices)
    bound = (
        f"no plan is under {1e3 * bound_s:.2f}"
        if math.isfinite(bound_s)
        else "no plan keeps the limit"
    )
    return (
        f"planner {answer.planner}, schedule {problem.schedule.name}, {shape}{m} micro-batches{size}: step "
        f"{1e3 * simulated_step_s(problem, stages):.2f} ms simulated ({bound}), "
        f"slowest stage {1e3 * answer.evaluation.bottleneck_s:.2f} ms, "
        f"{reduced}{idle:.1%} idle, planned in {answer.planning_s:.2f} s"
        + (f"; {len(answer.splits)} layers are cut in two" if answer.splits else "")
    )
