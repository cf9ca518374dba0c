"""What plans take at least, many of them at once: as if no transfer waited for another, and each link for itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jvpipe.planners.joint.segment_table import StageTable
from jvpipe.planners.model.forecast import unqueued_steps_s
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import StageCost
from jvpipe.simulate.stages import PARTS

Runs = Float[np.ndarray, " runs"]


@dataclass(frozen=True)
class Load:
    """One stage in many candidates: seconds per micro-batch; lower bounds where its fates are not settled."""

    forward_s: Runs
    backward_s: Runs  # and what is computed again before
    comm_s: Runs  # of the link before it
    link_s: Runs  # how long its own link is busy

    @staticmethod
    def of_cost(cost: StageCost, runs: int) -> "Load":
        """Gives a stage that takes the same in all candidates."""
        seconds = cost.forward_s, cost.backward_s + cost.recompute_s, cost.comm_s, cost.link_s
        return Load(*(np.full(runs, x) for x in seconds))

    @staticmethod
    def of(stage: StageTable, rows: np.ndarray, columns: np.ndarray) -> "Load":
        """Gives some cells of a table: of what takes longer than keeping everything, all is taken for recomputation.

        Args:
            stage: the table.
            rows: of the candidates' cells.
            columns: of the same.
        """
        block, at = stage.block, (rows, columns)
        forward_s, compute_s, traffic_s = (
            block.forward_s[at],
            block.compute_s[at],
            block.traffic_s[at],
        )
        seconds = stage.seconds[at]
        work_s = np.where(seconds > np.maximum(compute_s, traffic_s), seconds, compute_s)
        return Load(forward_s, work_s - forward_s, block.comm_s[at], traffic_s)


def least_steps_s(problem: Problem, stages: Sequence[Load]) -> Runs:
    """Seconds per step that the simulator is not below, for every candidate.

    Args:
        problem: whose schedule and micro-batches count.
        stages: what each stage takes in all candidates.
    """
    nothing = np.zeros_like(stages[0].comm_s)
    loads = np.zeros((len(nothing), len(stages), len(PARTS)))
    for s, (stage, after) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
        sent_s = after.comm_s / 2 if after else nothing
        parts = (
            stage.forward_s,
            nothing,
            stage.backward_s,
            nothing,
            nothing,
            sent_s,
            stage.comm_s / 2,
            nothing,
            nothing,
            nothing,
        )
        loads[:, s] = np.stack(parts, 1)
    impossible = np.isinf(loads.max(axis=(1, 2)))
    least_s = unqueued_steps_s(problem, np.where(impossible[:, None, None], 0.0, loads))
    busy_s = problem.microbatches * np.maximum.reduce([stage.link_s for stage in stages])
    return np.where(impossible, np.inf, np.maximum(least_s, busy_s))
