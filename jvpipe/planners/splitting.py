"""Cuts layers in two if whole layers are too few, too uneven, or too large for the memory limit.

    `finest`         halves all layers until there are as many layers as stages
    `within_limit`   halves all layers once if no plan of whole layers keeps the memory limit
    `better`         cuts a few layers if one stage is slower than the others

vPipe and DawnPiper cut a model between any nodes of the framework's graph. jvpipe also cuts
inside layers, but only if that pays, because each layer costs a dispatch per micro-batch.
`better` considers all places inside layers and between them together. It accepts cuts whose
slowest stage is nearly as fast as possible. Among these, it prefers those with the fewest cut
layers, and then those that send the fewest bytes. Measured seconds may decide which layers are
cut, but they do not change what a run computes: a layer is cut only if its halves give bitwise
identical results (`programs.bit_equality`).

A stage of finer layers may hold fewer bytes. But measured seconds, which vary, must not
decide whether a limit can be kept. So `within_limit` tries only two models: the one with whole
layers, and the one with all layers halved. `SPLITTING` has the thresholds, which may be changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jvpipe._jax import Atom, JaxprEqn
from jvpipe.cost import roofline
from jvpipe.cost.costs import bounds_inside
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.slowness import work_s
from jvpipe.planners.model.chain_dp import Matrix, least_path
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.planned_problem import Planned
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
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
    """When it is worth cutting a layer, and how many tries are made.

    Attributes:
        slow_times: layers are cut if the slowest stage takes more than this many times the mean.
        near_times: cuts whose slowest stage takes up to this many times the least possible
            are accepted, because they may cut fewer layers.
        apart: a share of a stage's mean seconds; if a place inside a layer is closer than
            this to the place before it, one of the two is left out.
        worth_s: a layer that takes fewer seconds than this for a micro-batch, forward and
            backward, is not cut, because a dispatch takes some 0.05 ms.
        gain: the share of a step's seconds that finer layers must save.
        rounds: how many rounds of cutting there are at most; a later one may cut halves again.
        layers_per_stage: with more layers than this per stage, layers are not halved to keep
            a limit, because halving such small layers would save hardly any bytes.
        places: how many places `finer` tries in a layer, and how many sets of cuts `evener` tries.
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
"""Tells whether two halves give results bitwise identical to those of their layer.

It is called with the whole model, the layer, and the model with the layer cut in two.
"""


@dataclass(frozen=True)
class CutCandidate:
    """A model cut into layers, and its plan."""

    traced: Traced
    planned: Planned


@dataclass(frozen=True)
class Splitter:
    """A cutter of layers.

    Args:
        device: the kind of device for which the seconds of a layer's equations are estimated.
        keeps_bits: tells whether halves give bitwise identical results.
    """

    device: Accelerator
    keeps_bits: BitCheck

    def finest(self, traced: Traced, stages: int) -> Traced:
        """Cuts a model into at least as many layers as stages, or as finely as it can be cut.

        The loop ends, because each round adds layers, and each layer has at least one equation.

        Args:
            traced: the model.
            stages: how many stages the plan is to have.
        """
        while len(traced.graph.layers) < stages and (finer := self.finer(traced)):
            traced = finer
        return traced

    def within_limit(
        self, traced: Traced, stages: int, plan: Callable[[Traced], CutCandidate]
    ) -> tuple[CutCandidate, int]:
        """Plans whole layers, or halved layers if no plan of whole layers keeps the limit.

        Args:
            traced: the model with whole layers.
            stages: how many stages the plan has.
            plan: makes a plan of a model.

        Returns:
            The plan, and how many rounds of `better` may follow: 1 for whole layers, 0 for halves.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; the error has the smallest limit
                that a plan keeps, with whole or halved layers.
        """
        try:
            return plan(traced), 1
        except MemoryLimitExceeded as error:
            refused = error
        few = len(traced.graph.layers) <= SPLITTING.layers_per_stage * stages
        halves = self.finer(traced) if few else None
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
        """Returns a plan with finer layers that saves at least `SPLITTING.gain`, or else `begin`.

        Args:
            begin: the plan so far.
            plan: makes a plan of a model.
            rounds: how many rounds there are at most.
        """
        best = begin
        for _ in range(rounds):
            finer = self.evener(best.traced, best.planned) if uneven(best.planned) else None
            if finer is None:
                break
            try:
                candidate = plan(finer)
            except (Infeasible, MemoryLimitExceeded):
                break
            if candidate.planned.step_s > best.planned.step_s * (1 - SPLITTING.gain):
                break
            best = candidate
        return best

    def evener(self, traced: Traced, planned: Planned) -> Traced | None:
        """Cuts layers so that stages become as even as possible.

        A place is refused if results would not be bitwise identical. It is then left out
        for all layers of the same kind, and the cuts are chosen again.

        Args:
            traced: the model.
            planned: its plan so far.

        Returns:
            The model with finer layers; None if no cut inside a layer helps, or all tries
            are refused.
        """
        seconds = work_s(planned.problem.costs.layers)
        together = {
            layer
            for group in planned.problem.together
            for layer in range(min(group), max(group) + 1)
        }
        # Layers that must share a stage cannot be separated, so cutting one of them gains nothing.
        apart = (i for i in range(len(seconds)) if i not in together)
        worth = [i for i in apart if seconds[i] >= SPLITTING.worth_s]
        inside = places_inside(traced, worth, self._equation_s)
        for _ in range(SPLITTING.places):
            where = even_places(planned, inside)
            wrong = self._first_wrong(traced, where)
            if wrong is None:
                return split_at(traced, where) if where else None
            refused, before_end = wrong
            kind = layer_signature(traced.bodies[refused])
            for layer, places in inside.items():
                if layer_signature(traced.bodies[layer]) == kind:
                    inside[layer] = [place for place in places if place.before_end != before_end]
        return None

    def _first_wrong(
        self, traced: Traced, where: Sequence[tuple[int, int]]
    ) -> tuple[int, int] | None:
        """Returns a place at which results would not be bitwise identical, or None."""
        cut = traced
        # The last place is cut first, so that the numbers of earlier layers stay the same.
        # If a layer is cut at two places, the earlier place then lies in the first half. It
        # is counted from the end of that half, so the equations of the second half
        # (`after`) are subtracted.
        after: dict[int, int] = {}
        for layer, before_end in reversed(where):
            finer = split_layers(cut, {layer: before_end - after.get(layer, 0)})
            if not self.keeps_bits(cut, layer, finer):
                return layer, before_end
            cut, after[layer] = finer, before_end
        return None

    def finer(self, traced: Traced) -> Traced | None:
        """Cuts in two all layers that can be cut; returns None if there is none."""
        # Layers of one kind share a program, so all of them are cut at the same place.
        kinds = [layer_signature(body) for body in traced.bodies]
        where = {kind: self._place(traced, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
        places = enumerate(map(where.get, kinds))
        cuts = {layer: place for layer, place in places if place is not None}
        return split_layers(traced, cuts) if cuts else None

    def _place(self, traced: Traced, layer: int) -> int | None:
        """Finds the best place to cut a layer in two; None if there is no place."""
        for point in split_points(traced, layer, self._equation_s)[: SPLITTING.places]:
            halves = split_layers(traced, {layer: point})
            if self.keeps_bits(traced, layer, halves):
                return point
        return None

    def _equation_s(self, eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> list[float]:
        """Estimates the seconds of each equation on the device."""
        return roofline.equation_seconds(eqns, outputs, self.device)


def uneven(planned: Planned) -> bool:
    """Tells whether the slowest stage exceeds the mean by enough to make cutting layers worth it.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.problem import Decision, Problem
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs(tuple(LayerCost("block", t, 2 * t, (Option(0),)) for t in (1.0, 5.0, 1.0)))
    >>> problem = Problem(costs, 3, find_schedule("1f1b"), microbatches=8)
    >>> decision = Decision.keeping_all([0, 1, 2, 3])
    >>> uneven(Planned(decision.plan(problem, "given"), problem, decision))
    True
    """
    seconds = [cost.compute_s for cost in planned.evaluation.stages]
    return max(seconds) * len(seconds) > SPLITTING.slow_times * sum(seconds)


@dataclass(frozen=True)
class _Cut:
    """A place where one stage may end and the next begin.

    Attributes:
        at_s: the seconds of all layers and parts of layers before the place.
        sent_bytes: the bytes that cross the place.
        layer: the layer in which the place is; None for a place between two layers.
        before_end: how many equations the place is before the end of that layer.
    """

    at_s: float
    sent_bytes: int
    layer: int | None = None
    before_end: int = 0


def even_places(
    planned: Planned, inside: Mapping[int, Sequence[CutPlace]]
) -> list[tuple[int, int]]:
    """Returns the places inside layers at which stages should end to be nearly even.

    Two dynamic programs run over all n places inside layers and between them, each in O(S n^2)
    for S stages (`planners/model/chain_dp.py`). The first finds the least seconds of the slowest
    stage. The second allows stages that take slightly longer (`SPLITTING.near_times`), and finds
    the cuts with the fewest cut layers and, among those, the fewest sent bytes. A stage that
    recomputes, or has a slow device, takes more seconds than the sum of its layers. The ratio of
    its seconds to this sum is assumed to stay as it is.

    Args:
        planned: the plan so far.
        inside: the possible places inside each layer.

    Returns:
        For each place the layer, and how many equations the place is before the layer's end.
    """
    problem = planned.problem
    layer_s = work_s(problem.costs.layers)
    times = _times(planned, layer_s)
    mean_s = sum(layer_s) / len(times)
    cuts = _apart(_cuts(planned, layer_s, inside), SPLITTING.apart * mean_s)
    at_s = np.array([cut.at_s for cut in cuts])
    link_s = np.array([2 * problem.peer.seconds(cut.sent_bytes) for cut in cuts])
    link_s[0] = 0.0  # nothing comes in before the first layer
    between_s = at_s - at_s[:, None]

    def matrices() -> Iterator[Matrix]:
        """Yields each stage's seconds, by the place where it begins (row) and ends (column).

        They include transfers of the tensors that cross the place where the stage begins, and of
        their cotangents.
        """
        for time in times:
            work_s = time * between_s
            with_link_s = work_s + link_s[:, None]
            yield np.where(work_s > 0, with_link_s, np.inf)

    least_s, _ = least_path(matrices(), np.maximum)
    if not np.isfinite(least_s):
        return []
    sent = np.array([float(cut.sent_bytes) for cut in cuts])
    # A cut layer costs 1, and all sent bytes together cost less than 1.
    cuts_a_layer = np.array([cut.layer is not None for cut in cuts])
    price = cuts_a_layer + sent / (1 + sent.sum())
    most_s = SPLITTING.near_times * least_s
    # Each stage's price, by the same places; infinite if the stage takes too long.
    prices = (np.where(x <= most_s, price[:, None], np.inf) for x in matrices())
    _, path = least_path(prices, np.add)
    assert path is not None
    chosen = [cuts[at] for at in path]
    return [(cut.layer, cut.before_end) for cut in chosen if cut.layer is not None]


def _times(planned: Planned, layer_s: Sequence[float]) -> list[float]:
    """Returns, for each stage, its seconds divided by the sum of its layers' seconds."""
    stages = zip(planned.evaluation.stages, pairwise(planned.decision.bounds), strict=True)
    return [stage.compute_s / (sum(layer_s[i:j]) or 1.0) for stage, (i, j) in stages]


def _cuts(
    planned: Planned, layer_s: Sequence[float], inside: Mapping[int, Sequence[CutPlace]]
) -> list[_Cut]:
    """Returns all places where a stage may begin or end, in their order."""
    costs = planned.problem.costs
    # crossing[k]: bytes that cross the bound before layer k; over[k]: those that also pass layer k.
    crossing = [0] * (len(layer_s) + 1)
    over = [0] * len(layer_s)
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
            # Besides the tensors between the halves, those that pass the whole layer are sent.
            sent_bytes = over[layer] + place.sent_bytes
            cuts.append(_Cut(at_s, sent_bytes, layer, place.before_end))
        before_s += seconds
        if layer + 1 not in joined:
            cuts.append(_Cut(before_s, crossing[layer + 1]))
    return cuts


def _apart(cuts: Sequence[_Cut], least_s: float) -> list[_Cut]:
    """Leaves out places inside layers that are less than `least_s` after the place before them.

    If that place is inside a layer, too, the one of the two with fewer bytes is kept. Places
    between layers are never left out.
    """
    kept = [cuts[0]]
    for cut in cuts[1:]:
        before = kept[-1]
        if cut.layer is None or cut.at_s - before.at_s >= least_s:
            kept.append(cut)
        elif before.layer is not None and cut.sent_bytes < before.sent_bytes:
            kept[-1] = cut
    return kept
