"""Converts a planner's answer to data for JSON: its stages, and the shapes that were tried."""

from itertools import pairwise
from typing import Any

from jvpipe.planners.answer import Answer


def stages_json(answer: Answer) -> list[dict[str, Any]]:
    """Returns each stage's layers, seconds and bytes, by their names in the output of `--json`.

    Each stage also has `host_bytes`, which tables show and which the output of `--json` omits.

    Args:
        answer: an answer that has a plan.
    """
    assert answer.plan is not None
    assert answer.evaluation is not None
    stages = []
    for stage, cost in zip(answer.plan.stages, answer.evaluation.stages, strict=True):
        state = {"state_fates": dict(stage.state_fates)} if stage.state_fates else {}
        stages.append(
            {
                "layers": list(stage.layers),
                "devices": list(stage.devices),
                "replicas": len(stage.devices),
                "forward_s": cost.forward_s,
                "backward_s": cost.backward_s,
                "recompute_s": cost.recompute_s,
                "swap_s": cost.swap_s,
                "comm_s": cost.comm_s,
                "peak_bytes": cost.peak_bytes,
                "in_flight": cost.in_flight,
                "input_s": cost.halves_s[0],
                "weight_s": cost.halves_s[1],
                "reduce_s": cost.reduce_s,
                "update_s": cost.update_s,
                "host_bytes": cost.host_bytes,
                "fates": dict(stage.fates),
                **state,
            }
        )
    return stages


def shapes_json(answer: Answer) -> list[dict[str, Any]]:
    """Returns the best plan of each kind of shape that the planner tried, the fastest first."""
    return [
        {
            "shape": kind,
            "replicas": list(plan.shape.replicas),
            "layers_per_stage": [end - first for first, end in pairwise(plan.decision.bounds)],
            "microbatches": plan.problem.microbatches,
            "step_s": plan.step_s,
        }
        for kind, plan in sorted(answer.kinds.items(), key=lambda item: item[1].step_s)
    ]
