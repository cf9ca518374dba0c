"""Rough plans of shapes, in which each stage keeps everything or recomputes everything.

A shape says which devices each place of the pipeline has. The seconds of a step are estimated
first: the time to fill and drain the pipeline, and the period, which is the time between two
micro-batches in the long run. The period depends on stages, round trips and networks. Shapes are
ranked by this estimate, and the best are simulated.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_cost import Evaluation, StageCost, evaluation_of, stage_cost


@dataclass(frozen=True)
class RoughPlan:
    """A shape with a plan that was found quickly; `step_s` is infinite until it is simulated."""

    shape: Shape
    problem: Problem
    decision: Decision
    evaluation: Evaluation
    step_s: float = np.inf

    @cached_property
    def estimate_s(self) -> float:
        """An estimate of the seconds of a step; a plan of few tasks is simulated instead."""
        stages = self.evaluation.stages
        if self.problem.microbatches * len(stages) <= SHAPE.few_tasks:
            return self.simulated().step_s
        period_s = max(_period_s(stages), _network_s(self.problem, stages))
        return _estimate_s(stages, self.problem.microbatches, period_s)

    def simulated(self) -> "RoughPlan":
        """Returns the plan with simulated seconds; of many micro-batches, some are simulated."""
        stages = self.evaluation.stages
        count = SHAPE.microbatches * self.problem.stages
        # In the long run micro-batches are equally far apart. The difference of two short runs
        # tells how far.
        if self.problem.microbatches <= 2 * count:
            return replace(self, step_s=simulated_step_s(self.problem, stages))
        half = count // 2
        half_s = simulated_step_s(replace(self.problem, microbatches=half), stages)
        step_s = simulated_step_s(replace(self.problem, microbatches=count), stages)
        apart_s = (step_s - half_s) / (count - half)
        rest_s = (self.problem.microbatches - count) * apart_s
        return replace(self, step_s=step_s + rest_s)

    @property
    def path(self) -> Path:
        """The plan's shape and bounds."""
        return self.shape, self.decision.bounds


def kept_or_again(problem: Problem, bounds: tuple[int, ...]) -> Decision:
    """Decides for each stage to keep everything, or, if that is over the limit, to recompute all.

    Args:
        problem: gives the limits.
        bounds: of the stages.
    """
    return RoughStages().evaluate(problem, bounds)[0]


class RoughStages:
    """A cache of the stages of a model's shapes, each counted once.

    Neighbouring shapes have nearly all stages in common: a bound that moves changes two stages. A
    stage does not depend on which devices it has, only on how many there are, how slow they are,
    and which links they use.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, StageCost]] = {}

    def evaluate(
        self,
        problem: Problem,
        bounds: tuple[int, ...],
    ) -> tuple[Decision, Evaluation]:
        """Decides which stages keep everything, and counts their seconds and bytes.

        Args:
            problem: of a shape.
            bounds: of the shape's stages.
        """
        choices = list[int]()
        stages = list[StageCost]()
        for s, (i, j) in enumerate(pairwise(bounds)):
            choice, stage = self._stage(problem, s, i, j)
            choices += [choice] * (j - i)
            stages.append(stage)
        decision = Decision(bounds, tuple(choices))
        return decision, evaluation_of(problem, stages)

    def _stage(
        self,
        problem: Problem,
        s: int,
        i: int,
        j: int,
    ) -> tuple[int, StageCost]:
        """Returns the choice for all layers of a stage, and the stage's cost."""
        group = problem.group(s)
        # All that distinguishes this stage from the same layers on other devices; whatever a
        # stage's cost depends on must be part of the key.
        apart = group.replicas, group.receives, group.reduces, group.slowness, group.less_bytes
        key = problem.microbatches, problem.stages, s, i, j, apart
        if key not in self._known:
            choice = 0
            limit = problem.limit_of(problem.places[s])
            stage = stage_cost(problem, s, i, j, [0] * j)
            if limit is not None and stage.peak_bytes > limit:
                choice = RECOMPUTE
                stage = stage_cost(problem, s, i, j, [RECOMPUTE] * j)
            self._known[key] = choice, stage
        return self._known[key]


def of_each_kind(plans: Iterable[RoughPlan]) -> dict[str, RoughPlan]:
    """Picks the first plan of each kind of shape."""
    kinds: dict[str, RoughPlan] = {}
    for plan in plans:
        kinds.setdefault(plan.shape.kind, plan)
    return kinds


def _period_s(stages: Sequence[StageCost]) -> float:
    """Estimates the period: seconds between two micro-batches in the long run, without networks.

    The period is at least the seconds of the slowest stage, and those of the slowest link in one
    direction. It is also at least the seconds of a round trip through stages a to r, and the links
    between them, divided by r - a + 1, because r - a + 1 more micro-batches are in flight on stage
    a than after stage r (see `trips.py`).
    """
    period_s = max(max(stage.seconds, stage.comm_s / 2) for stage in stages)
    through_s = [0.0, *accumulate(stage.compute_s + stage.comm_s for stage in stages)]
    # Round trips from stage a to stage r.
    for a, stage in enumerate(stages):
        before_s = through_s[a] + stage.comm_s
        for r in range(a + 1, len(stages)):
            period_s = max(period_s, (through_s[r + 1] - before_s) / (r - a + 1))
    return period_s


def _network_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Counts for how long a micro-batch keeps one direction of the busiest network busy.

    The other direction is busy for as long.
    """
    busy_s: defaultdict[int, float] = defaultdict(float)
    for s in range(1, len(stages)):
        before = problem.group(s - 1).machines
        here = problem.group(s).machines
        if before != here and len({*before, *here}) > 1:
            # Values leave the machines of one stage, cotangents leave those of the other.
            for machine in (*set(before), *set(here)):
                busy_s[machine] += stages[s].comm_s / 2
    return max(busy_s.values(), default=0.0)


def _estimate_s(
    stages: Sequence[StageCost],
    microbatches: int,
    period_s: float,
) -> float:
    """Estimates a step: fill and drain, M - 1 periods, and all-reduces and updates that end late.

    Stage s ends its last backward earlier than stage 0, by the backwards of the stages before it
    and half of the links up to it. What it does once per step counts as far as it takes longer.

    Args:
        stages: with their seconds.
        microbatches: M.
        period_s: seconds between two micro-batches.
    """
    fill_s = sum(stage.compute_s + stage.comm_s for stage in stages)
    late_s = earlier_s = 0.0
    for stage in stages:
        earlier_s += stage.comm_s / 2
        late_s = max(late_s, stage.reduce_s + stage.update_s - earlier_s)
        earlier_s += stage.backward_s + stage.waiting_s
    return fill_s + (microbatches - 1) * period_s + late_s
