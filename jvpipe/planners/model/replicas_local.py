"""All segments of layers at a local batch: their seconds, and the bytes on each device of a stage of them.

Legend: b examples. What a segment takes at b lies on the line of the known sizes (`replicas_costs.py`), as what each of
its layers takes does; so sums over segments are made at known sizes alone.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from jaxtyping import Float

from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import Link
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.replicas_costs import LocalCosts
from jvpipe.planners.model.segments import Cuts, Grid, between, most_up_to, sums
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


class Known:
    """The bytes of all segments between some cuts at a size whose costs are known."""

    def __init__(self, kept: KeepAll) -> None:
        self.kept, self.segments, self.cuts = kept, kept.segments, kept.cuts
        self._waiting: dict[tuple[int, int], Grid] = {}

    @staticmethod
    def of(costs: Costs, cuts: Cuts) -> "Known":
        """Those of some costs."""
        return Known(
            KeepAll(Problem(costs, 1, ONE_F_ONE_B, 1, peer=Link(1.0)), cuts=cuts)
        )  # a second per byte

    def at(self, cuts: Cuts) -> "Known":
        """The same between other cuts."""
        return Known(self.kept.at(cuts))

    @cached_property
    def inside(self) -> np.ndarray:
        """Where there is a layer."""
        return self.cuts > self.cuts[:, None]

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns of a micro-batch."""
        return np.where(self.inside, self.kept.comm_s, 0.0)

    @cached_property
    def static_bytes(self) -> Grid:
        """What is there whatever is in flight, at any size."""
        return self.kept.static_bytes(0)

    def waiting_bytes(self, early: int, late: int) -> Grid:
        """Values that arrive early and cotangents that wait, for so many stages."""
        key = early, late
        if key not in self._waiting:
            early_bytes = self.segments.early_bytes((1,) * early, self.cuts, self.cuts)
            self._waiting[key] = early_bytes + self.segments.late_bytes(late, self.cuts, self.cuts)
        return self._waiting[key]

    @cached_property
    def gradient_bytes(self) -> Float[np.ndarray, "N"]:
        """Sums of gradients over layers."""
        return sums(
            layer.gradient_bytes or layer.parameter_bytes
            for layer in self.kept.problem.costs.layers
        )

    @cached_property
    def most_gradient_bytes(self) -> Grid:
        """The gradients of the layer of each segment that has most."""
        each, cuts = np.diff(self.gradient_bytes), self.cuts
        most = np.zeros((len(cuts), len(cuts)))
        for row, i in enumerate(cuts[:-1]):
            most[row, row + 1 :] = np.maximum.accumulate(each[i : cuts[-1]])[
                cuts[row + 1 :] - i - 1
            ]
        return most


class Local:
    """All segments between some cuts at one local batch.

    Args:
        costs: of the layers.
        known: the segments at the sizes that these are known at.
        b: the local batch.
        most_stages: that there can be.
    """

    def __init__(self, costs: LocalCosts, known: list[Known], b: int, most_stages: int) -> None:
        self._given, self._most_stages = (costs, b), most_stages
        low, high, self._mix = costs.line(b)
        self._known, self._near, self._far = known, known[low], known[high]
        self.cuts, self.gradient_bytes = self._near.cuts, self._near.gradient_bytes
        forward_s, backward_s, recompute_s = costs.seconds(b)
        self.forward_s, self.recompute_s = sums(forward_s), sums(recompute_s)
        self.backward_s = sums(backward_s) + self.recompute_s
        self._peaks: dict[tuple[int, int, int, bool], Grid] = {}

    def at(self, cuts: Cuts) -> "Local":
        """The same between other cuts."""
        costs, b = self._given
        return Local(costs, [known.at(cuts) for known in self._known], b, self._most_stages)

    def _mixed(self, of: Callable[[Known], np.ndarray]) -> np.ndarray:
        return self._mix(of(self._near), of(self._far))

    @cached_property
    def seconds(self) -> Grid:
        """Forward and backward of each segment, infinite where it holds no layer."""
        every = between(self.forward_s + self.backward_s, self.cuts, self.cuts)
        return np.where(self._near.inside, every, np.inf)

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns; of a micro-batch if the local batch is one."""
        return self._mixed(lambda known: known.crossing_bytes)

    @property
    def crossing_at(self) -> Float[np.ndarray, "N"]:
        """What crosses a cut before each layer."""
        return self._mixed(lambda known: known.segments.crossing_bytes)

    def peak_bytes(self, behind: int, microbatches: int, replicas: int) -> Grid:
        """The bytes of each segment on a device, but for what replicas share out.

        While gradients are added up nothing is in flight, and a device has the sum of a layer's and another one's.

        Args:
            behind: stages from this one on: so many micro-batches are in flight, if there are as many.
            microbatches: of a step.
            replicas: of the stage.
        """
        reach, longest = self._near.segments.reaches
        early = max(
            0, min(microbatches - behind, self._most_stages - behind, reach)
        )  # stages that have one more
        key = min(behind, microbatches), early, min(behind - 1, longest), replicas > 1
        if key not in self._peaks:
            in_flight, early, late, reduces = key
            fixed = self._near.static_bytes + self._mixed(
                lambda known: known.waiting_bytes(early, late)
            )
            peaks = fixed + in_flight * self._kept_bytes + self._beyond_bytes
            peaks = (
                np.maximum(peaks, fixed + 2 * self._near.most_gradient_bytes) if reduces else peaks
            )
            self._peaks[key] = np.where(self._near.inside, np.rint(peaks), np.inf)
        return self._peaks[key]

    @cached_property
    def _kept_bytes(self) -> Grid:
        """What is kept of one micro-batch."""
        return self._mixed(lambda known: known.kept.kept_bytes)

    @cached_property
    def _beyond_bytes(self) -> Grid:
        """What the layer at work needs beyond what its micro-batch keeps in the end."""
        return (
            most_up_to(self._mixed(lambda known: known.kept.at_work), self.cuts, self.cuts)
            - self._kept_bytes
        )
