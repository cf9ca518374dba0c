"""The seconds and bytes of segments with every residual kept, for planners that choose no fates.

Like a grid of `KeepAll`, a grid has a row for each cut at which a segment may begin, and a column
for each cut at which it may end. An entry is infinite if the segment would have no layer.
"""

from collections.abc import Sequence

import numpy as np

from jvpipe.planners.model.grids import between, sums
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.segments import CutBlock
from jvpipe.planners.model.spans import Grid


class KeptStages(KeepAll):
    """The numbers that `stage_cost` gives for each segment if each layer has its `options[0]`."""

    def forward_s(self, s: int) -> Grid:
        """Returns the seconds of stage s's forward."""
        forward_s = self.segments.forward_of(s)
        return self._inside(
            between(
                forward_s,
                self.cuts,
                self.cuts,
            )
        )

    def compute_s(self, s: int) -> Grid:
        """Returns the seconds of stage s's forward and backward."""
        layers = self.problem.layers_on(s)
        extra_s = sums(layer.options[0].extra_s for layer in layers)
        compute_s = self.segments.compute_of(s) + extra_s
        return self._inside(
            between(
                compute_s,
                self.cuts,
                self.cuts,
            )
        )

    def seconds(self, s: int) -> Grid:
        """Returns the seconds per micro-batch of stage s's work, or of its host link if longer.

        The host link is busy only if transfers between stages go through it.
        """
        return np.maximum(self.compute_s(s), self._links(s).traffic_s)

    def once_s(self, s: int) -> Grid:
        """Returns a micro-batch's share of the seconds of stage s's updates."""
        return self._inside(self._links(s).once_s / self.problem.microbatches)

    def comm_s(self, s: int) -> Grid:
        """Returns the seconds to transfer what stage s reads, and the cotangents of it back."""
        return self._inside(self._links(s).comm_s)

    def _links(self, s: int) -> CutBlock:
        """Returns a block whose seconds of links and of updates are those of stage s."""
        if not self.problem.groups:
            return self._block  # all devices and links are alike
        return self.segments.block(s, self.cuts, self.cuts)

    def where_it_fits(self, s: int, grid: Grid) -> Grid:
        """Returns a grid whose entries are infinite where stage s would be over the limit.

        Args:
            s: the number of the stage.
            grid: a number for each segment.
        """
        limit = self.problem.memory_limit_bytes
        if limit is None:
            return grid
        return np.where(
            self.peak_bytes(s) <= limit,
            grid,
            np.inf,
        )

    def decision(self, places: Sequence[int]) -> Decision:
        """Returns the decision that keeps everything and cuts at these rows of the grids."""
        return Decision.keeping_all([int(self.cuts[place]) for place in places])
