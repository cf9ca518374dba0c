"""What segments of layers take at each local batch, roughly: what shapes are sought by before any is planned.

Legend: a micro-batch of mu examples on r replicas, each of which works on ceil(mu / r). Stages keep
everything where that keeps the limit, else compute all again; a stage is as full as its distance
from the end says. What arrives early from stages further away is left out. Whoever finds a shape so
asks for its plan, which counts exactly (`stage_cost.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.costs import Costs, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import (
    Cuts,
    Grid,
    between,
    seconds,
    sums,
    surely_spared_bytes,
)
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_bytes import on_device_bytes, recompute_peak_bytes
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

MOST_CUTS = 32
"""Of more cuts so many are looked at: of each share of the work that where least crosses."""
PerLayer = Float[np.ndarray, " layers"]


class LocalSegments:
    """The segments between some cuts of the shapes of a model: `cuts` are all, `coarse` those looked at."""

    def __init__(self, shapes: Shapes, most_cuts: int = MOST_CUTS) -> None:
        self.shapes, self.pins, self._most_cuts = shapes, shapes.pins, most_cuts
        costs = shapes.local.costs[-1]
        forbidden = {b for group in costs.together for b in range(min(group) + 1, max(group) + 1)}
        self.cuts = np.array([b for b in range(shapes.layers + 1) if b not in forbidden])
        if crossed := sorted(forbidden & set(self.pins.bounds or ())):
            raise ValueError(
                f"cuts {self.pins.cuts}: layers {crossed[0] - 1} and {crossed[0]} must share a stage"
            )
        self.most_stages = min(shapes.devices, len(self.cuts) - 1)
        if (self.pins.count or 1) > self.most_stages:
            raise ValueError(
                f"{self.pins.count} stages: layers that must share a stage leave {len(self.cuts) - 1} pieces, use "
                f"at most {self.most_stages} stages"
            )
        # Problems that are alike give the same tables: as many as there are local batches, and stages behind.
        self.kept = cache(self._kept)
        self.again = cache(self._again)
        self.fitting_s = cache(self._fitting_s)
        self.compute_s = cache(self._compute_s)
        self.waiting_bytes = cache(self._waiting_bytes)

    @cached_property
    def coarse(self) -> Cuts:
        """The cuts that are looked at."""
        if self.pins.bounds:
            return np.array(self.pins.bounds)
        size = self.shapes.sizes[len(self.shapes.sizes) // 2]
        every = KeepAll(_alone(self.shapes.local.at(size)), cuts=self.cuts)
        return self.cuts[few_cuts(every, self._most_cuts)]

    def share(self, size: int, replicas: int) -> int:
        """The examples that the busiest of some replicas works on, of a micro-batch of `size`."""
        return -(-size // replicas)

    def _kept(self, b: int) -> KeepAll:
        """Everything is kept, of `b` examples; links carry a byte a second."""
        return KeepAll(_alone(self.shapes.local.at(b)), cuts=self.coarse)

    def _again(self, b: int) -> KeepAll:
        """Everything is computed again, of `b` examples."""
        return KeepAll(_alone(computing_again(self.shapes.local.at(b))), cuts=self.coarse)

    def _compute_s(self, b: int) -> PerLayer:
        """The seconds of each layer's forward and backward on `b` examples."""
        layers = self.shapes.local.at(b).layers
        return np.array([layer.forward_s + layer.backward_s for layer in layers])

    def backward_s(self, b: int) -> Float[np.ndarray, "N"]:
        """Sums of layers' backwards on `b` examples."""
        segments = self.kept(b).segments
        return segments.compute_s - segments.forward_s

    def crossing_bytes(self, size: int) -> Grid:
        """What each segment receives and returns of a micro-batch of `size` examples."""
        return np.where(np.isfinite(self.kept(size).comm_s), self.kept(size).comm_s, 0.0)

    def _fitting_s(self, size: int, replicas: int, behind: int) -> Grid:
        """Seconds of each segment: kept if that keeps the limit, else computed again, else infinite.

        Args:
            size: examples of a micro-batch.
            replicas: of the stage.
            behind: stages from it on.
        """
        b, limit = self.share(size, replicas), self.shapes.model.memory_limit_bytes
        kept_s = self.kept(b).compute_s(0)
        if limit is None:
            return kept_s
        fits = self.peak_bytes(self.kept(b), size, replicas, behind) <= limit
        if fits[0, -1]:
            return kept_s  # even the whole model fits
        again = self.again(b)
        other_fits = self.peak_bytes(again, size, replicas, behind) <= limit
        return np.where(fits, kept_s, np.where(other_fits, again.compute_s(0), np.inf))

    def peak_bytes(self, kept: KeepAll, size: int, replicas: int, behind: int) -> Grid:
        """The bytes of each segment on a device of a stage.

        Args:
            kept: the segments of its share.
            size: examples of a micro-batch.
            replicas: of the stage.
            behind: stages from it on: so many micro-batches are in flight, if there are as many.
        """
        microbatches = self.shapes.batch // size
        in_flight = min(behind, microbatches)
        layers, static = self.shapes.local.costs[-1].layers, kept.static_bytes(0)
        spared = surely_spared_bytes(layers, self.coarse, self.coarse, replicas)
        early, late = self.waiting_bytes(self.share(size, replicas))
        waiting = early * (behind < microbatches) + late * (behind > 1)
        training = on_device_bytes(in_flight, kept.kept_bytes) + kept.beyond_bytes
        if replicas > 1:
            training = np.maximum(training, 2 * self.most_reduced_bytes)
        peak = static - spared + waiting + training
        return np.where(np.isfinite(kept.compute_s(0)), peak, np.inf)

    def _waiting_bytes(self, b: int) -> tuple[Grid, Grid]:
        """What waits at each segment, of `b` examples: values that come early, and cotangents that are to go back.

        The stage before it has one micro-batch more in flight, the stage behind it takes one more at a time.
        """
        segments = self.kept(b).segments
        early = segments.early_bytes((1,), self.coarse, self.coarse)
        return early, segments.late_bytes(1, self.coarse, self.coarse)

    @cached_property
    def most_reduced_bytes(self) -> Grid:
        """The largest gradients of a layer that each segment's replicas add up."""
        reduced = np.array([float(x.reduced_bytes) for x in self.shapes.local.costs[-1].layers])
        most = np.zeros((len(self.coarse), len(self.coarse)))
        for a, start in enumerate(self.coarse[:-1]):
            rising = np.maximum.accumulate(reduced[start:])
            most[a, a + 1 :] = rising[self.coarse[a + 1 :] - start - 1]
        return most

    def reduce_s(self, b: int, link: Link) -> Grid:
        """What each segment's replicas take to add up gradients, as far as its backward cannot hide it.

        Args:
            b: examples of a share.
            link: of the all-reduce.
        """
        layers = self.shapes.local.costs[-1].layers
        size = between(sums(x.reduced_bytes for x in layers), self.coarse, self.coarse)
        whole_s = seconds(link, size)
        if not self.shapes.model.overlaps:
            return whole_s
        hidden_s = between(self.backward_s(b), self.coarse, self.coarse)
        return np.where(size > 0, np.maximum(whole_s - hidden_s, link.latency_s), 0.0)

    def counts(self, size: int) -> tuple[int, ...]:
        """The replica counts that differ: of those with the same largest share the least.

        Of 16 examples, 4 or 5 replicas have shares of 4 at most, 8 to 15 of 2.
        """
        most, feeds = min(self.shapes.devices, size), self.pins.feeds
        least = {-(-size // r): r for r in range(most, 0, -1) if feeds(r, size)}
        return tuple(sorted(least.values()))


def _alone(costs: Costs) -> Problem:
    """A problem of one stage whose links carry a byte a second, so that seconds of links are bytes."""
    return Problem(costs, 1, ONE_F_ONE_B, 1, peer=Link(1.0))


def computing_again(costs: Costs) -> Costs:
    """The costs of layers that keep their inputs alone, and compute all else again."""
    layers = (
        replace(x, options=(Option(0, extra_s=x.forward_s, extra_bytes=recompute_peak_bytes(x)),))
        for x in costs.layers
    )
    return replace(costs, layers=tuple(layers))


def few_cuts(every: KeepAll, most: int) -> Int[np.ndarray, "n"]:
    """The positions of at most so many cuts: of each share of seconds and gradients that where least crosses.

    Args:
        every: the segments between all cuts.
        most: how many there may be.
    """
    cuts, last = every.cuts, len(every.cuts) - 1
    if last < most:
        return np.arange(last + 1)
    layers = every.problem.costs.layers
    work_s, gradients = every.segments.compute_s[cuts], sums(x.reduced_bytes for x in layers)[cuts]
    work = work_s / max(work_s[-1], 1e-30) + gradients / max(gradients[-1], 1.0)
    share = np.minimum((work / max(work[-1], 1e-30) * (most - 2)).astype(int), most - 3)
    crossing, best = every.segments.crossing_bytes[cuts], dict[int, int]()
    for at in range(1, last):
        if share[at] not in best or crossing[at] < crossing[best[share[at]]]:
            best[int(share[at])] = at
    chosen = {0, last, *best.values()}
    others = sorted(set(range(last)) - chosen, key=lambda at: crossing[at])
    return np.array(sorted({*chosen, *others[: most - len(chosen)]}))


def least_through_s(segments: LocalSegments, size: int, counts: Sequence[int]) -> PerLayer:
    """What each layer takes at least, whatever number of replicas it has.

    Args:
        segments: of a model.
        size: examples of a micro-batch.
        counts: of replicas.
    """
    return np.min([segments.compute_s(segments.share(size, r)) for r in counts], axis=0)
