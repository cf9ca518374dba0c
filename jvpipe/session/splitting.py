"""Finer layers: where whole layers leave a stage slower than the others, layers of it are cut in two.

vPipe and DawnPiper cut between nodes of the framework's graph; so does this, but only where it pays, for each layer
costs a dispatch per micro-batch. Which layers are cut may depend on the plan: only cuts that keep all bits are made
(`programs.bit_equality`), so what a run computes does not.

Finer layers also hold less, and whether a memory limit can be kept must not hang on seconds. So under a limit there are
two models to choose from, whatever a clock says: whole layers, and all of them halved.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from jvpipe.cost import roofline
from jvpipe.cost.hardware import Accelerator
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.session.asking import Planned
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import layer_signature, split_layers, split_points

NEAR = 1.1
"""How many times slower than the mean a stage is before its layers are cut."""
GAIN = 0.02
"""The share of a step that finer layers must save."""
ROUNDS = 2
WORTH_S = 0.5e-3
"""Seconds on a micro-batch, forward and backward, under which a layer is not cut: a dispatch takes some 0.05 ms."""
FEW_LAYERS = 8
"""Of models of more layers per stage, halves hold hardly less."""
_PLACES = 3
"""How many places in a layer are tried."""

BitCheck = Callable[[Traced, int, Traced], bool]
"""Whether a layer of a model has the bits of the two that it is in another."""


@dataclass(frozen=True)
class CutCandidate:
    """A model cut into layers, and its plan."""

    traced: Traced
    optimizer: OptimizerCut
    planned: Planned

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated."""
        problem = self.planned.problem
        return simulated_step_s(problem, evaluate(problem, self.planned.decision).stages)


@dataclass(frozen=True)
class Splitter:
    """Cuts layers in two on a kind of device; `keeps_bits` says whether that changes no bit."""

    device: Accelerator
    keeps_bits: BitCheck

    def finest(self, traced: Traced, stages: int) -> Traced:
        """A model with at least so many layers, if it can be cut so fine."""
        while len(traced.graph.layers) < stages:
            finer = self.finer(traced, range(len(traced.graph.layers)))
            if finer is None:
                break
            traced = finer
        return traced

    def within_limit(
        self, traced: Traced, stages: int, plan: Callable[[Traced], CutCandidate]
    ) -> tuple[CutCandidate, int]:
        """The plan of whole layers, or of halves where those keep no limit; and how often layers may be cut further.

        Args:
            traced: the model in whole layers.
            stages: of the plans.
            plan: makes one.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; the least that would do is named.
        """
        try:
            return plan(traced), 1
        except MemoryLimitExceeded as error:
            halves, refused = self.halved(traced, stages), error
        if halves is None:
            raise refused
        try:
            return plan(halves), 0
        except MemoryLimitExceeded as error:
            raise min(refused, error, key=lambda x: x.smallest_limit_bytes) from None

    def better(
        self,
        begin: CutCandidate,
        plan: Callable[[Traced], CutCandidate],
        rounds: int = ROUNDS,
        *,
        limited: bool = False,
    ) -> CutCandidate:
        """A plan with finer layers, if it is faster by more than `GAIN`; else the one that is there.

        Args:
            begin: the plan that is there.
            plan: makes another.
            rounds: how often layers may be cut.
            limited: whether there is a memory limit.
        """
        best = begin
        for _ in range(rounds):
            slow, stages = crowded(best.planned), best.planned.problem.stages
            if not slow:
                return best
            finer = self.halved(best.traced, stages) if limited else self.finer(best.traced, slow)
            if finer is None:
                return best
            try:
                candidate = plan(finer)
            except (Infeasible, MemoryLimitExceeded):
                return best
            if candidate.step_s > best.step_s * (1 - GAIN):
                return best
            best = candidate
        return best

    def halved(self, traced: Traced, stages: int) -> Traced | None:
        """The model with all layers cut in two that can be; None if there are none, or many layers already."""
        layers = range(len(traced.graph.layers))
        return self.finer(traced, layers) if len(layers) <= FEW_LAYERS * stages else None

    def finer(self, traced: Traced, layers: Collection[int]) -> Traced | None:
        """The model with these layers, and all that are like them, cut in two; None if none of them can be."""
        kinds = [layer_signature(body) for body in traced.bodies] if layers else []
        where: dict[Hashable, int | None] = {}
        for layer in layers:
            if kinds[layer] not in where:
                where[kinds[layer]] = self._place(traced, layer)
        cuts = {i: place for i, k in enumerate(kinds) if (place := where.get(k)) is not None}
        return split_layers(traced, cuts) if cuts else None

    def _place(self, traced: Traced, layer: int) -> int | None:
        points = split_points(
            traced, layer, lambda eqns, out: roofline.equation_seconds(eqns, out, self.device)
        )
        halves = ((p, split_layers(traced, {layer: p})) for p in points[:_PLACES])
        return next((p for p, split in halves if self.keeps_bits(traced, layer, split)), None)


def crowded(planned: Planned) -> list[int]:
    """The layers of the slowest stage that are worth a cut, if that stage is much slower than the mean.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.problem import Decision, Problem
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs(tuple(LayerCost("block", t, 2 * t, (Option(0),)) for t in (1.0, 5.0, 1.0)))
    >>> problem = Problem(costs, 3, find_schedule("1f1b"), microbatches=8)
    >>> decision = Decision.keeping_all([0, 1, 2, 3])
    >>> crowded(Planned(decision.plan(problem, "given"), problem, decision))
    [1]
    """
    problem, bounds = planned.problem, planned.decision.bounds
    seconds = [cost.compute_s for cost in evaluate(problem, planned.decision).stages]
    slowest = seconds.index(max(seconds))
    if seconds[slowest] * len(seconds) <= NEAR * sum(seconds):
        return []
    costs = problem.costs.layers
    return [
        i
        for i in range(*bounds[slowest : slowest + 2])
        if costs[i].forward_s + costs[i].backward_s >= WORTH_S
    ]
