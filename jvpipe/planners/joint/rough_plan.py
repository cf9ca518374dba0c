"""Rough plans of shapes: each stage keeps everything or computes all again, and few micro-batches are simulated.

A step is estimated first: fill and drain, and how far apart micro-batches are in the long run, by stages, round trips
and networks. Shapes are ranked by that, and the best of them simulated.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Group, Problem
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_cost import (
    Evaluation,
    StageCost,
    device_bytes,
    needed_limit_bytes,
    slowest_s,
    stage_bytes,
    stage_cost,
    surrogate,
)


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
        """Seconds that no simulation is below: all micro-batches on one stage, or on the link before it.

        The first one has come there before, the last one's cotangent goes back from there.
        """
        before_s = longest_s = 0.0
        for stage in self.evaluation.stages:
            link_s = before_s + self.problem.microbatches * stage.comm_s / 2
            before_s += stage.comm_s
            stage_s = before_s + self.problem.microbatches * stage.compute_s
            longest_s = max(longest_s, link_s, stage_s)
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


class RoughStages:
    """What `kept_or_again` and `evaluate` say of many shapes of a model, each stage counted once.

    Shapes that are near each other have nearly all stages in common: a bound that moves changes two of them. Which
    devices a stage has does not matter, only how many, how slow, and by which links.
    """

    def __init__(self) -> None:
        self._kinds: dict[Shape, list[int]] = {}
        self._kind_of: dict[tuple[Hashable, ...], int] = {}
        self._known: dict[tuple[int, int, int], tuple[int, StageCost]] = {}

    def evaluate(
        self, shape: Shape, problem: Problem, bounds: tuple[int, ...]
    ) -> tuple[Decision, Evaluation]:
        """Decides what stages keep, and counts what they take.

        Args:
            shape: whose stages they are; its problem is always the same.
            problem: of the shape.
            bounds: of the stages.
        """
        kinds = self._kinds_of(shape, problem)
        every = [self._stage(problem, s, kind, bounds[s : s + 2]) for s, kind in enumerate(kinds)]
        lengths = [j - i for i, j in pairwise(bounds)]
        choices = [c for (c, _), n in zip(every, lengths, strict=True) for c in [c] * n]
        stages = tuple(stage for _, stage in every)
        held = device_bytes(problem, stages)
        limit_bytes = needed_limit_bytes(problem, held)
        step_s, bottleneck_s = surrogate(problem, stages), slowest_s(problem, stages)
        evaluation = Evaluation(stages, step_s, bottleneck_s, held, limit_bytes)
        return Decision(bounds, tuple(choices)), evaluation

    def _kinds_of(self, shape: Shape, problem: Problem) -> list[int]:
        """Numbers for all that a stage's seconds and bytes depend on but its layers."""
        if shape not in self._kinds:
            alike = shape.size, problem.stages, problem.microbatches
            self._kinds[shape] = [
                self._kind_of.setdefault((*alike, s, *_apart(group)), len(self._kind_of))
                for s, group in enumerate(problem.groups)
            ]
        return self._kinds[shape]

    def _stage(
        self, problem: Problem, s: int, kind: int, bounds: tuple[int, ...]
    ) -> tuple[int, StageCost]:
        """The choice for all layers of a stage of a kind, and what it takes."""
        i, j = bounds
        if (kind, i, j) not in self._known:
            choice, limit = 0, problem.limit_of(problem.places[s])
            stage = stage_cost(problem, s, i, j, [0] * j)
            if limit is not None and stage.peak_bytes > limit:
                choice = RECOMPUTE
                stage = stage_cost(problem, s, i, j, [RECOMPUTE] * j)
            self._known[kind, i, j] = choice, stage
        return self._known[kind, i, j]


def _apart(group: Group) -> tuple[Hashable, ...]:
    """What tells devices apart that share micro-batches of the same size."""
    return group.replicas, group.receives, group.reduces, group.slowness, group.less_bytes


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
