"""Layers cut inside, where whole layers leave a stage slower than the others, or keep no limit.

vPipe and DawnPiper cut between nodes of the framework's graph; so does this, but only where it
pays, for each layer costs a dispatch per micro-batch. All places inside layers, and between them,
are looked at together: of the cuts whose slowest stage is nearly the least, those that cut the
fewest layers and send the fewest bytes are taken. Which layers are cut may depend on measured
seconds; what a run computes does not, for only cuts are made that keep all bits
(`programs.bit_equality`).

Finer layers also hold less, and whether a memory limit can be kept must not hang on seconds. So
under a limit there are two models that may keep it, whatever a clock says: whole layers, and all of
them halved.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jvpipe._jax import Atom, JaxprEqn
from jvpipe.cost import roofline
from jvpipe.cost.costs import bounds_inside
from jvpipe.cost.hardware import Accelerator
from jvpipe.planners.model.chain_dp import Matrix, least_max, least_sum
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.session.planning import Planned, work_s
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import (
    CutPlace,
    layer_signature,
    places_inside,
    split_at,
    split_layers,
    split_points,
)


@dataclass(frozen=True)
class SplitEffort:
    """When a layer is worth being cut, and how often that is tried.

    Attributes:
        slow_times: how many times slower than the mean a stage is before its layers are cut.
        near_times: how many times slower than need be a stage may stay for fewer layers that are
            cut.
        apart: the share of a stage's mean seconds by which two places differ of which both are
            looked at.
        worth_s: seconds on a micro-batch, forward and backward, under which a layer is not cut: a
            dispatch takes some 0.05 ms.
        gain: the share of a step that finer layers must save.
        rounds: how often layers are cut.
        layers_per_stage: of models of more layers per stage, halves hold hardly less.
        places: in a layer that are tried for halves.
    """

    slow_times: float = 1.03
    near_times: float = 1.01
    apart: float = 0.01
    worth_s: float = 0.5e-3
    gain: float = 0.01
    rounds: int = 2
    layers_per_stage: int = 8
    places: int = 3


SPLITTING = SplitEffort()

BitCheck = Callable[[Traced, int, Traced], bool]
"""Whether a layer of a model is bitwise identical to the two that it is in another."""


@dataclass(frozen=True)
class CutCandidate:
    """A model cut into layers, and its plan."""

    traced: Traced
    planned: Planned


@dataclass(frozen=True)
class Splitter:
    """Cuts layers in two on a kind of device; `keeps_bits` says whether that changes no bit."""

    device: Accelerator
    keeps_bits: BitCheck

    def finest(self, traced: Traced, stages: int) -> Traced:
        """Cuts a model into at least so many layers, if it can be cut so fine."""
        while len(traced.graph.layers) < stages:
            finer = self.finer(traced, range(len(traced.graph.layers)))
            if finer is None:
                break
            traced = finer
        return traced

    def within_limit(
        self, traced: Traced, stages: int, plan: Callable[[Traced], CutCandidate]
    ) -> tuple[CutCandidate, int]:
        """Plans whole layers, or halves where those keep no limit.

        Also says how often layers may be cut further.

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
        rounds: int = SPLITTING.rounds,
    ) -> CutCandidate:
        """Finds a plan with finer layers that is faster by more than `SPLITTING.gain`; else returns the first.

        Args:
            begin: the plan that is there.
            plan: makes another.
            rounds: how often layers may be cut.
        """
        best = begin
        for _ in range(rounds):
            finer = self.evener(best.traced, best.planned) if uneven(best.planned) else None
            if finer is None:
                return best
            try:
                candidate = plan(finer)
            except (Infeasible, MemoryLimitExceeded):
                return best
            if candidate.planned.step_s > best.planned.step_s * (1 - SPLITTING.gain):
                return best
            best = candidate
        return best

    def evener(self, traced: Traced, planned: Planned) -> Traced | None:
        """Returns the model with layers cut where stages would be as even as can be.

        Returns None if no layer need be.

        Args:
            traced: the model.
            planned: its plan so far.
        """
        seconds = work_s(planned.problem.costs.layers)
        together = {
            layer
            for group in planned.problem.together
            for layer in range(min(group), max(group) + 1)
        }
        # Layers that must share a stage have no cut between them, so a cut inside of one is no use.
        apart = (i for i in range(len(seconds)) if i not in together)
        worth = [i for i in apart if seconds[i] >= SPLITTING.worth_s]
        inside = places_inside(traced, worth, self._equation_s)
        for _ in range(SPLITTING.places):
            where = even_places(planned, inside)
            wrong = self._first_wrong(traced, where)
            if wrong is None:
                return split_at(traced, where) if where else None
            kind = layer_signature(traced.bodies[wrong[0]])
            inside = {
                layer: [
                    place
                    for place in places
                    if place.before_end != wrong[1] or layer_signature(traced.bodies[layer]) != kind
                ]
                for layer, places in inside.items()
            }
        return None

    def _first_wrong(
        self, traced: Traced, where: Sequence[tuple[int, int]]
    ) -> tuple[int, int] | None:
        """Returns the first of some places at which a cut would change bits.

        Returns None if all may be cut.
        """
        cut = traced
        # The last place first: what is before it keeps its number, and its distance to the end of
        # the cut layer.
        after: dict[int, int] = {}
        for layer, before_end in reversed(where):
            finer = split_layers(cut, {layer: before_end - after.get(layer, 0)})
            if not self.keeps_bits(cut, layer, finer):
                return layer, before_end
            cut, after[layer] = finer, before_end
        return None

    def halved(self, traced: Traced, stages: int) -> Traced | None:
        """Cuts all layers in two that can be; None if there are none, or many layers already."""
        layers = range(len(traced.graph.layers))
        return (
            self.finer(traced, layers)
            if len(layers) <= SPLITTING.layers_per_stage * stages
            else None
        )

    def finer(self, traced: Traced, layers: Collection[int]) -> Traced | None:
        """Cuts these layers, and all that are like them, in two; None if none of them can be."""
        # Layers that are alike share a program, so all of a kind are cut at one place.
        kinds = [layer_signature(body) for body in traced.bodies] if layers else []
        where: dict[Hashable, int | None] = {}
        for layer in layers:
            if kinds[layer] not in where:
                where[kinds[layer]] = self._place(traced, layer)
        cuts = {i: place for i, k in enumerate(kinds) if (place := where.get(k)) is not None}
        return split_layers(traced, cuts) if cuts else None

    def _place(self, traced: Traced, layer: int) -> int | None:
        points = split_points(traced, layer, self._equation_s)
        halves = ((p, split_layers(traced, {layer: p})) for p in points[: SPLITTING.places])
        return next((p for p, split in halves if self.keeps_bits(traced, layer, split)), None)

    def _equation_s(self, eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> list[float]:
        return roofline.equation_seconds(eqns, outputs, self.device)


def uneven(planned: Planned) -> bool:
    """Tells whether the slowest stage is so much slower than the mean that layers are worth being cut.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.problem import Decision, Problem
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs(tuple(LayerCost("block", t, 2 * t, (Option(0),)) for t in (1.0, 5.0, 1.0)))
    >>> problem = Problem(costs, 3, find_schedule("1f1b"), microbatches=8)
    >>> decision = Decision.keeping_all([0, 1, 2, 3])
    >>> uneven(Planned(decision.plan(problem, "given"), problem, decision))
    True
    """
    seconds = [
        cost.compute_s for cost in evaluate_decision(planned.problem, planned.decision).stages
    ]
    return max(seconds) * len(seconds) > SPLITTING.slow_times * sum(seconds)


@dataclass(frozen=True)
class _Cut:
    """A place where one stage may end and the next begin.

    Attributes:
        at_s: seconds of all that comes before.
        sent_bytes: what goes from one stage to the other.
        layer: the layer that it is inside of; None between two layers.
        before_end: there: how many equations before the layer's end.
    """

    at_s: float
    sent_bytes: int
    layer: int | None = None
    before_end: int = 0


def even_places(
    planned: Planned, inside: Mapping[int, Sequence[CutPlace]]
) -> list[tuple[int, int]]:
    """Returns the places inside layers at which stages are as even as can be: layers, equations before their ends.

    A dynamic program over all places, as for whole layers (`planners/model/chain_dp.py`), twice:
    for the least seconds of the slowest stage, and for the fewest cut layers of all cuts that
    nearly reach them. A stage takes as many times the seconds of its layers as it does now: more
    where it computes again, or on a slower device.

    Args:
        planned: the plan so far.
        inside: the places that there are, by layer.
    """
    problem, bounds = planned.problem, planned.decision.bounds
    layer_s = work_s(problem.costs.layers)
    stages = evaluate_decision(problem, planned.decision).stages
    # How many times the seconds of its layers each stage takes now: the places do not change that.
    times = [
        stage.compute_s / (sum(layer_s[i:j]) or 1.0)
        for stage, (i, j) in zip(stages, pairwise(bounds), strict=True)
    ]
    cuts = _apart(_cuts(planned, layer_s, inside), SPLITTING.apart * sum(layer_s) / len(stages))
    at_s = np.array([cut.at_s for cut in cuts])
    link_s = np.array([2 * problem.peer.seconds(cut.sent_bytes) for cut in cuts])
    link_s[0] = 0.0  # nothing comes in before the first layer

    def matrices() -> Iterator[Matrix]:
        """What each stage takes from any place to any other, with the time that it waits for what comes in."""
        for stage, time in enumerate(times):
            starts = slice(None) if stage else slice(1)
            ends = slice(None) if stage < len(times) - 1 else slice(-1, None)
            work_s = time * (at_s[None, ends] - at_s[starts, None])
            yield np.where(work_s > 0, work_s + link_s[starts, None], np.inf)

    least_s = least_max(matrices())
    if not np.isfinite(least_s):
        return []
    sent = np.array([float(cut.sent_bytes) for cut in cuts])
    price = np.array([cut.layer is not None for cut in cuts]) + sent / (1 + sent.sum())
    near = (
        np.where(matrix <= SPLITTING.near_times * least_s, price[: len(matrix), None], np.inf)
        for matrix in matrices()
    )
    _, path = least_sum(near)
    assert path is not None
    chosen = [cuts[at] for at in path]
    return [(cut.layer, cut.before_end) for cut in chosen if cut.layer is not None]


def _cuts(
    planned: Planned, layer_s: Sequence[float], inside: Mapping[int, Sequence[CutPlace]]
) -> list[_Cut]:
    """Returns all places where a stage may begin or end, in their order."""
    costs = planned.problem.costs
    # What goes between two layers, and past a layer, by the number of the later layer, and of that
    # layer.
    crossing, over = [0] * (len(layer_s) + 1), [0] * len(layer_s)
    for edge in costs.edges:
        last = max(edge.readers, default=edge.producer)
        for k in range(edge.producer + 1, last + 1):
            crossing[k] += edge.bytes
            over[k] += edge.bytes if k < last else 0
    joined = bounds_inside(planned.problem.together)
    before_s, cuts = 0.0, [_Cut(0.0, 0)]
    for layer, seconds in enumerate(layer_s):
        for place in inside.get(layer, ()):
            at_s = before_s + place.share * seconds
            cuts.append(_Cut(at_s, over[layer] + place.sent_bytes, layer, place.before_end))
        before_s += seconds
        if layer + 1 not in joined:
            cuts.append(_Cut(before_s, crossing[layer + 1]))
    return cuts


def _apart(cuts: Sequence[_Cut], least_s: float) -> list[_Cut]:
    """Leaves out places inside layers that hardly differ from the one before, except those that send less."""
    kept = [cuts[0]]
    for cut in cuts[1:]:
        near = cut.at_s - kept[-1].at_s < least_s
        if cut.layer is None or not near:
            kept.append(cut)
        elif kept[-1].layer is not None and cut.sent_bytes < kept[-1].sent_bytes:
            kept[-1] = cut
    return kept
