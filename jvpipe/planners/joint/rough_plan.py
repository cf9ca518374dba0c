"""Rough plans of shapes: each stage keeps everything or computes all again, and few micro-batches are simulated.

A step is estimated first: fill and drain, and how far apart micro-batches are in the long run, by stages, round trips
and networks. Shapes are ranked by that, and the best of them simulated.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_bytes import stage_bytes
from jvpipe.planners.model.stage_cost import Evaluation, StageCost


@dataclass(frozen=True)
class RoughPlan:
    """A shape, and what a plan of it takes that is not sought for long.

    `few` is the problem with so few micro-batches that nothing changes but the length of a step.
    """

    shape: Shape
    problem: Problem
    few: Problem
    decision: Decision
    evaluation: Evaluation
    step_s: float = np.inf

    @property
    def least_s(self) -> float:
        """Seconds that no simulation is below: all micro-batches on one stage, and the first one's way there."""
        before_s = longest_s = 0.0
        for stage in self.evaluation.stages:
            longest_s = max(longest_s, before_s + self.problem.microbatches * stage.compute_s)
            before_s += stage.compute_s
        return longest_s

    @cached_property
    def estimate_s(self) -> float:
        """About the seconds of a step."""
        stages = self.evaluation.stages
        period_s = max(_period_s(stages), _network_s(self.problem, stages))
        return _estimate_s(stages, self.problem.microbatches, period_s)

    def simulated(self) -> "RoughPlan":
        """The same with the simulated seconds of a step; micro-batches beyond `few` are as far apart as those."""
        count, m = self.few.microbatches, self.problem.microbatches
        stages = self.evaluation.stages
        step_s = simulated_step_s(self.few, stages)
        if count < m:
            half = replace(self.few, microbatches=count // 2)
            apart_s = (step_s - simulated_step_s(half, stages)) / (count - count // 2)
            step_s += (m - count) * apart_s
        return replace(self, step_s=step_s)

    @property
    def path(self) -> Path:
        """Its shape and its bounds."""
        return self.shape, self.decision.bounds


def kept_or_again(problem: Problem, bounds: tuple[int, ...]) -> Decision:
    """Decides that stages keep everything, or compute all again where that does not keep the limit.

    Args:
        problem: whose limits count.
        bounds: of the stages.
    """
    choices = [0] * bounds[-1]
    for s, (i, j) in enumerate(pairwise(bounds)):
        limit = problem.limit_of(problem.places[s])
        if limit is not None and stage_bytes(problem, s, i, j, choices).peak > limit:
            choices[i:j] = [RECOMPUTE] * (j - i)
    return Decision(bounds, tuple(choices))


def of_each_kind(plans: Iterable[RoughPlan]) -> dict[str, RoughPlan]:
    """Picks the first plan of each kind of shape."""
    kinds: dict[str, RoughPlan] = {}
    for plan in plans:
        kinds.setdefault(plan.shape.kind, plan)
    return kinds


def _period_s(stages: Sequence[StageCost]) -> float:
    """How far apart micro-batches are in the long run, if no network is shared.

    Legend: t a stage, c the link before it both ways. A period is as long as the slowest stage, as the slowest link one
    way, and as stages a to r with the links between them divided by r - a + 1: so many micro-batches more are in flight
    on a than behind r (see `trips.py`).
    """
    period_s = max(max(stage.seconds, stage.comm_s / 2) for stage in stages)
    through_s = [0.0, *accumulate(stage.compute_s + stage.comm_s for stage in stages)]
    for a, stage in enumerate(stages):
        before_s = through_s[a] + stage.comm_s
        for r in range(a + 1, len(stages)):
            period_s = max(period_s, (through_s[r + 1] - before_s) / (r - a + 1))
    return period_s


def _network_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """How long a micro-batch keeps the busiest network of a machine busy, one way; both ways are as busy."""
    busy_s: defaultdict[int, float] = defaultdict(float)
    for s in range(1, len(stages)):
        before, here = (problem.group(x).machines for x in (s - 1, s))
        if before != here and len({*before, *here}) > 1:
            # Values leave by the machines of one stage, their cotangents by those of the other.
            for machine in (*set(before), *set(here)):
                busy_s[machine] += stages[s].comm_s / 2
    return max(busy_s.values(), default=0.0)


def _estimate_s(stages: Sequence[StageCost], microbatches: int, period_s: float) -> float:
    """Estimates the seconds of a step: fill and drain, M - 1 periods, and what of the all-reduces comes late.

    Stage s ends its last backward earlier than stage 0 by the backwards of the stages before it, and half of the links
    up to it.

    Args:
        stages: what they take.
        microbatches: M.
        period_s: how far apart micro-batches are.
    """
    fill_s = sum(stage.compute_s + stage.comm_s for stage in stages)
    late_s = earlier_s = 0.0
    for stage in stages:
        earlier_s += stage.comm_s / 2
        late_s = max(late_s, stage.reduce_s - earlier_s)
        earlier_s += stage.backward_s + stage.recompute_s
    return fill_s + (microbatches - 1) * period_s + late_s
