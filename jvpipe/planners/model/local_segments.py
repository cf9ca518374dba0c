"""Counts rough costs of segments (possible stages) at each local batch, to compare shapes.

Legend: a shape says how many devices (replicas) each stage has. A micro-batch of mu examples on r
replicas gives each replica a local batch of at most b = ceil(mu / r) examples. The coarse cuts are
a few of the allowed cuts. A grid's entry (i, j) is for the segment from the i-th to the j-th coarse
cut.

The costs are rough in two ways. A stage keeps everything if that fits the limit, and otherwise
recomputes everything. The number of micro-batches in flight is that of 1F1B, which depends only on
how far the stage is from the last one. Once a search has found a good shape by these costs, the
shape is planned with exact costs (`stage_cost.py`).
"""

from dataclasses import replace
from functools import cache, cached_property

import numpy as np
from jaxtyping import Float

from jvpipe.cost.costs import Costs, Option, bounds_inside
from jvpipe.cost.hardware import Link
from jvpipe.planners.model.grids import between, reduce_s, sums
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import Group, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.spans import Cuts, Grid
from jvpipe.planners.model.stage_bytes import recompute_peak_bytes
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

PerLayer = Float[np.ndarray, " layers"]


class LocalSegments:
    """The segments of a model between a few of its cuts, with their costs at each local batch.

    Attributes:
        most: about how many of the allowed cuts (`cuts`) become coarse cuts (`coarse`). With more
            of them, shapes are compared more exactly, and more slowly.
        shapes: gives the costs, the devices and what the user has fixed.
    """

    most = 32

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.pins = shapes.pins
        forbidden = bounds_inside(shapes.local.costs[-1].together)
        self.cuts = np.array([b for b in range(shapes.layers + 1) if b not in forbidden])
        crossed = forbidden.intersection(self.pins.bounds or ())
        if crossed:
            b = min(crossed)
            raise ValueError(
                f"cuts {self.pins.cuts}: layers {b - 1} and {b} must share a stage",
            )
        pieces = len(self.cuts) - 1
        self.most_stages = min(shapes.devices, pieces)
        if (self.pins.count or 1) > self.most_stages:
            raise ValueError(
                f"{self.pins.count} stages: layers that must share a stage leave {pieces} pieces, "
                f"use at most {self.most_stages} stages"
            )
        self.layer_s = cache(self._layer_s)
        self.crossing_bytes = cache(self._crossing_bytes)
        self.fitting_s = cache(self._fitting_s)
        self.reduce_s = cache(self._reduce_s)
        self._everything = cache(self._kept)

    @cached_property
    def coarse(self) -> Cuts:
        """The cuts between which segments are counted."""
        if self.pins.bounds:
            return np.array(self.pins.bounds)
        return self.few(self.cuts, self.most)

    def few(self, cuts: Cuts, count: int) -> Cuts:
        """Picks cuts that are spread evenly over the work, and that few bytes cross.

        A layer's work is the mean of its share of all seconds and its share of all gradient bytes.
        The model is divided into sections of equal work. In each section, the cut that the fewest
        bytes cross is picked.

        Args:
            cuts: the cuts to pick from; the first and the last, the ends of the model, stay.
            count: about how many to pick. It is raised to at least two for each stage, if `pins`
                fix the number of stages.
        """
        count = max(count, 2 * (self.pins.count or 0))
        if len(cuts) <= count:
            return cuts
        sizes = self.shapes.sizes
        costs = self.shapes.local.at(sizes[len(sizes) // 2])
        segments = Segments(_of_stages(costs))
        inner = cuts[1:-1]
        works = segments.compute_s, sums(layer.reduced_bytes for layer in costs.layers)
        work = sum(total[inner] / max(total[-1], 1e-30) for total in works) / 2
        sections = np.ceil(work * (count - 2))
        fewest_last = np.argsort(-segments.crossing_bytes[inner], kind="stable")
        # The cut with the fewest bytes comes last, and a dictionary keeps the last entry of a key.
        chosen = {sections[at]: int(inner[at]) for at in fewest_last}
        return np.array([cuts[0], *sorted(chosen.values()), cuts[-1]])

    def share(self, size: int, replicas: int) -> int:
        """Counts the examples of a micro-batch that its busiest replica works on."""
        return -(-size // replicas)

    def _layer_s(self, b: int) -> Float[np.ndarray, "2 layers"]:
        """Counts the seconds of each layer's forward and backward on `b` examples."""
        layers = self.shapes.local.at(b).layers
        return np.array([(layer.forward_s, layer.backward_s) for layer in layers]).T

    def compute_s(self, b: int) -> PerLayer:
        """Counts the seconds of each layer's forward plus backward on `b` examples."""
        return self.layer_s(b).sum(0)

    def between(self, layers: PerLayer) -> Grid:
        """Sums a number per layer over each segment; infinite for segments without layers."""
        cuts = self.coarse
        return np.where(cuts > cuts[:, None], between(sums(layers), cuts, cuts), np.inf)

    def _crossing_bytes(self, size: int) -> Grid:
        """Counts the bytes that each segment receives and returns for `size` examples."""
        # The links of `_of_stages` carry a byte per second, so `comm_s` is a number of bytes.
        segments = Segments(_of_stages(self.shapes.local.at(size)))
        return segments.block(0, self.coarse, self.coarse).comm_s

    def _fitting_s(
        self,
        size: int,
        replicas: int,
        behind: int,
    ) -> Grid:
        """Counts each segment's seconds if all is kept or, where that does not fit, recomputed.

        The seconds are infinite if nothing fits. The arguments are those of `peak_bytes`.
        """
        b = self.share(size, replicas)
        limit = self.shapes.model.memory_limit_bytes
        kept_s = self.between(self.compute_s(b))
        if limit is None:
            return kept_s
        fits = self.peak_bytes(size, replicas, behind) <= limit
        if fits[0, -1]:
            return kept_s  # even the whole model fits
        again_fits = self.peak_bytes(size, replicas, behind, again=True) <= limit
        otherwise_s = np.where(again_fits, self.again_s(b), np.inf)
        return np.where(fits, kept_s, otherwise_s)

    def again_s(self, b: int) -> Grid:
        """Counts the seconds of each segment on `b` examples if all its forwards run again."""
        return self.between(self.compute_s(b) + self.layer_s(b)[0])

    def peak_bytes(
        self,
        size: int,
        replicas: int,
        behind: int,
        *,
        again: bool = False,
    ) -> Grid:
        """Counts the bytes of each segment on a device of a stage.

        Args:
            size: how many examples a micro-batch has.
            replicas: how many devices the stage has.
            behind: the number of stages from this one to the last, this one included.
            again: whether everything is recomputed; if not, everything is kept.
        """
        microbatches = self.shapes.batch // size
        kept = self._everything(
            self.share(size, replicas),
            replicas,
            min(microbatches, 3),
            again,
        )
        # In place of the stage, a stand-in is counted: a stage of a pipeline of three stages. Its
        # number `near` counts stages from the end, where the last stage is number 1. Values arrive
        # early at a stage if the stage before it has more micro-batches in flight. If behind <
        # microbatches, they arrive early at the present stage. Then the stand-in is number 1 or 2,
        # where values arrive early, too. Otherwise, the stand-in is number 3, the first stage, or
        # the stage's own number if that is smaller. `more` is how many more micro-batches the
        # stage has in flight than its stand-in.
        near = min(behind, 2 if behind < microbatches else 3)
        more = min(behind, microbatches) - min(near, microbatches)
        return kept.peak_bytes(kept.problem.stages - near) + more * kept.kept_bytes

    def _kept(
        self,
        b: int,
        replicas: int,
        microbatches: int,
        again: bool,
    ) -> KeepAll:
        """Makes the segments of three equal stages; of fewer if there are fewer layers.

        Args:
            b: how many examples the local batch has.
            replicas: how many devices each stage has.
            microbatches: how many micro-batches a step has.
            again: whether everything is recomputed; if not, everything is kept.
        """
        costs = self.shapes.local.at(b)
        if again:
            costs = computing_again(costs)
        stages = min(3, self.shapes.layers)
        return KeepAll(_of_stages(costs, stages, microbatches, replicas), self.coarse)

    def _reduce_s(self, b: int, link: Link) -> Grid:
        """Counts the seconds that each segment's all-reduce of gradients adds to a step.

        Args:
            b: how many examples the local batch has.
            link: the all-reduce as a link, such as `Group.reduces`.
        """
        layers = self.shapes.local.costs[-1].layers
        return reduce_s(
            link,
            sums(layer.reduced_bytes for layer in layers),
            sums(self.layer_s(b)[1]) if self.shapes.model.overlaps else None,
            self.coarse,
            self.coarse,
        )

    def counts(self, size: int) -> tuple[int, ...]:
        """Lists the numbers of replicas worth comparing, for micro-batches of `size` examples.

        The replica with the largest share sets the time. So if several numbers of replicas have the
        same largest share, only the smallest of them is listed. For 16 examples the largest share
        of 4 or 5 replicas is 4, and that of 8 to 15 replicas is 2. So of these, 4 and 8 are listed.
        """
        devices = min(self.shapes.devices, size)
        # Later entries replace earlier ones, so the fewest replicas stay for each share.
        least = dict[int, int]()
        for replicas in range(devices, 0, -1):
            if self.pins.feeds(replicas, size):
                least[self.share(size, replicas)] = replicas
        return tuple(sorted(least.values()))


def _of_stages(
    costs: Costs,
    stages: int = 1,
    microbatches: int = 1,
    replicas: int = 1,
) -> Problem:
    """Makes a problem of stages on equal devices, with links that carry one byte per second."""
    groups = (Group(tuple(range(replicas))),) * stages
    return Problem(costs, stages, ONE_F_ONE_B, microbatches, peer=Link(1.0), groups=groups)


def computing_again(costs: Costs) -> Costs:
    """Returns the costs of layers that keep only their inputs and recompute everything else."""
    layers = []
    for layer in costs.layers:
        again = Option(0, extra_s=layer.forward_s, extra_bytes=recompute_peak_bytes(layer))
        layers.append(replace(layer, options=(again,)))
    return replace(costs, layers=tuple(layers))
