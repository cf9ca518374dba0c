"""Judges shapes quickly, by rough plans: each stage keeps everything or recomputes everything.

A shape says which devices each place along the pipeline has, and how many examples a micro-batch
has. Many shapes are possible, and an exact plan of each would take too long. So a shape is judged
in two steps:

    estimate   seconds to fill and drain the pipeline, plus a period per further micro-batch. The
               period is the time between two micro-batches in the long run: the longest that any
               stage, round trip or network needs
    simulate   the shapes with the best estimates; if a step has many micro-batches, only some of
               them are simulated

`shape_search.py` ranks shapes by these numbers. They only decide which shapes are planned exactly,
so the estimate may be changed.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise

import numpy as np

from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.lot import Cell, cells
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_cost import Evaluation, StageCost, evaluation_of, stage_cost
from jvpipe.planners.model.stage_simulation import simulated_step_s


@dataclass(frozen=True)
class RoughPlan:
    """A shape with a plan found quickly; its `step_s` is infinite until the plan is simulated."""

    shape: Shape
    problem: Problem
    decision: Decision
    evaluation: Evaluation
    step_s: float = np.inf

    @cached_property
    def estimate_s(self) -> float:
        """The estimated seconds of a step; simulated ones if the plan has few tasks."""
        stages = self.evaluation.stages
        if self.problem.microbatches * len(stages) <= SHAPE.few_tasks:
            return self.simulated().step_s
        period_s = max(_period_s(stages), _network_s(self.problem, stages))
        return _estimate_s(stages, self.problem.microbatches, period_s)

    def simulated(self) -> "RoughPlan":
        """Returns the plan with its seconds; of many micro-batches, only some are simulated."""
        problem = self.problem
        stages = self.evaluation.stages
        count = SHAPE.microbatches * problem.stages
        # In the long run, micro-batches end at equal distances in time. Two short runs give this
        # distance, from which the seconds of the other micro-batches follow.
        if problem.microbatches <= 2 * count:
            return replace(self, step_s=simulated_step_s(problem, stages))
        half = count // 2
        runs = (replace(problem, microbatches=m) for m in (half, count))
        half_s, step_s = (simulated_step_s(run, stages) for run in runs)
        apart_s = (step_s - half_s) / (count - half)
        rest_s = (problem.microbatches - count) * apart_s
        return replace(self, step_s=step_s + rest_s)

    @property
    def path(self) -> Path:
        """The plan's shape and bounds."""
        return self.shape, self.decision.bounds


def kept_or_again(problem: Problem, bounds: tuple[int, ...]) -> Decision:
    """Decides for each stage to keep everything, or, if that is over the limit, to recompute all.

    The limit may still be exceeded.

    Args:
        problem: gives the costs and the limit.
        bounds: of the stages.
    """
    return RoughStages().evaluate(problem, bounds)[0]


class RoughStages:
    """A cache of the stages of a model's shapes, so that each stage is counted once.

    Similar shapes have nearly all stages in common: a bound that moves changes only two. The cost
    of a stage does not depend on which devices it has, only on their number, speed, memory and
    links.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, StageCost]] = {}

    def evaluate(
        self,
        problem: Problem,
        bounds: tuple[int, ...],
    ) -> tuple[Decision, Evaluation]:
        """Decides for each stage as `kept_or_again` does, and counts its seconds and bytes."""
        choices = list[int]()
        stages = list[StageCost]()
        for cell in cells(bounds):
            _, i, j = cell
            choice, stage = self._stage(problem, cell)
            choices += [choice] * (j - i)
            stages.append(stage)
        decision = Decision(bounds, tuple(choices))
        return decision, evaluation_of(problem, stages)

    def _stage(self, problem: Problem, cell: Cell) -> tuple[int, StageCost]:
        """Returns the choice for all layers of a stage, and the stage's cost."""
        s, _, j = cell
        group = problem.group(s)
        # Everything that a stage's cost depends on must be part of the key.
        key = (
            problem.microbatches,
            problem.stages,
            cell,
            group.replicas,
            problem.link_into(s),
            problem.link_out_of(s),
            group.reduces,
            group.slowness,
            group.less_bytes,
        )
        if key not in self._known:
            choice = 0
            limit = problem.limit_of(problem.places[s])
            stage = stage_cost(problem, *cell, [0] * j)
            if limit is not None and stage.peak_bytes > limit:
                choice = RECOMPUTE
                stage = stage_cost(problem, *cell, [RECOMPUTE] * j)
            self._known[key] = choice, stage
        return self._known[key]


def of_each_kind(plans: Iterable[RoughPlan]) -> dict[str, RoughPlan]:
    """Picks the first plan of each kind of shape, such as "straight" (see `Shape.kind`)."""
    kinds: dict[str, RoughPlan] = {}
    for plan in plans:
        kinds.setdefault(plan.shape.kind, plan)
    return kinds


def _period_s(stages: Sequence[StageCost]) -> float:
    """Estimates the period, the seconds between two micro-batches in the long run.

    Networks are left out (see `_network_s`). The period is the largest of these numbers:

    - the seconds of a stage, or of one direction of a link;
    - the seconds of a round trip through stages a to r and the links between them, divided by
      r - a + 1, the number of micro-batches that start during one round trip (see `trips.py`).
    """
    period_s = max(max(stage.seconds, stage.comm_s / 2) for stage in stages)
    through_s = [0.0, *accumulate(stage.compute_s + stage.comm_s for stage in stages)]
    # Round trips from stage a to stage r.
    for a, r in combinations(range(len(stages)), 2):
        trip_s = through_s[r + 1] - (through_s[a] + stages[a].comm_s)
        period_s = max(period_s, trip_s / (r - a + 1))
    return period_s


def _network_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Counts the seconds for which a micro-batch keeps the busiest machine's network busy.

    A network has two directions, which are busy for equally long.
    """
    busy_s: defaultdict[int, float] = defaultdict(float)
    machines = [problem.group(s).machines for s in range(len(stages))]
    for stage, (before, here) in zip(stages[1:], pairwise(machines), strict=True):
        if before != here and len({*before, *here}) > 1:
            # Values leave the machines of one stage, and cotangents leave those of the other, so
            # each machine sends for half of `comm_s`.
            for machine in (*set(before), *set(here)):
                busy_s[machine] += stage.comm_s / 2
    return max(busy_s.values(), default=0.0)


def _estimate_s(
    stages: Sequence[StageCost],
    microbatches: int,
    period_s: float,
) -> float:
    """Estimates a step: fill and drain, M - 1 periods, and all-reduces and updates that end late.

    Stage s ends its last backward earlier than stage 0 does, because the last micro-batch still has
    to go back through the stages and links before s. So the all-reduce and the update of stage s
    add only the seconds by which they take longer than this way back.

    Args:
        stages: in the order of the pipeline.
        microbatches: M.
        period_s: the seconds between two micro-batches.
    """
    fill_s = sum(stage.compute_s + stage.comm_s for stage in stages)
    late_s = earlier_s = 0.0
    for stage in stages:
        earlier_s += stage.comm_s / 2
        late_s = max(late_s, stage.reduce_s + stage.update_s - earlier_s)
        earlier_s += stage.backward_s + stage.waiting_s
    return fill_s + (microbatches - 1) * period_s + late_s
