"""Cuts for slow links: no group of adjacent stages waits longer for its round trips than a cap.

Legend: t is a stage's seconds per micro-batch, c the seconds of the link before it in both
directions, and T the cap in seconds per micro-batch. A round trip through the group of stages a to
r takes a micro-batch forward from stage a to stage r and back. Stage a has only r - a more
micro-batches in flight than stage r, so that r - a + 1 micro-batches pass during one round trip. It
must therefore take at most r - a + 1 times the cap:

    t_a + c_(a+1) + t_(a+1) + ... + c_r + t_r  <=  (r - a + 1) T      for all a <= r

Let u_r be the most by which a group that ends with stage r exceeds this. Then

    u_r = t_r - T + max(0, u_(r-1) + c_r)

because the worst group either is stage r alone or extends the worst group that ends with stage
r - 1. So u grows along the path of cuts, a shortest path has the least u, and u must not be above 0
at any stage.

In a stream without other traffic on the links, the least T is the time between micro-batches. In a
step with a flush, only few micro-batches come in such turns, and the sum over all stages counts
too. So paths are made for several caps, each with the least sum of t + c + share * u.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.chain_dp import Matrix


@dataclass(frozen=True)
class Trips:
    """The possible stages between given cuts: their seconds, and those of the links before them.

    Under a cap, no entry of `busy_s` on the path may be above the cap either.
    """

    seconds: Sequence[Matrix]
    comm_s: Sequence[Matrix]
    busy_s: Sequence[Matrix] = ()

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yields the promising paths, each once, as the index of each bound's cut."""
        least_s = self.least_cap_s()
        if np.isinf(least_s):
            return
        seen = set()
        for cap, share in product(CUTS.trip_caps, CUTS.trip_weights):
            places = self.path(cap * least_s, share)
            if places and places not in seen:
                seen.add(places)
                yield places

    def least_cap_s(self) -> float:
        """Finds nearly the least cap under which there is a path; infinite if there is none."""
        # Under a cap that is the sum of the slowest stage, the slowest link and the busiest entry,
        # every path is allowed.
        caps = []
        for matrices in (self.seconds, self.comm_s, self.busy_s):
            slowest = (x[np.isfinite(x)].max(initial=0.0) for x in matrices)
            caps.append(max(slowest, default=0.0))
        low = 0.0
        high = sum(caps) + 1e-300
        if self.path(high) is None:
            return np.inf
        # The interval may be halved because a larger cap allows all paths that a smaller one does.
        while high - low > CUTS.trip_tolerance * high:
            middle = (low + high) / 2
            if self.path(middle) is not None:
                high = middle
            else:
                low = middle
        return high

    def path(self, cap_s: float, share: float = np.inf) -> tuple[int, ...] | None:
        """Finds the path with the least sum of t + c + share * u under a cap; None: none keeps it.

        With an infinite share it is the path with the least u: if that path exceeds the cap, all
        paths do.
        """
        over = np.zeros(1)
        total = np.zeros(1)
        came = list[np.ndarray]()
        for s, (t, c) in enumerate(zip(self.seconds, self.comm_s, strict=True)):
            # `grown` is u of this stage: of the stage alone, or of the worst group that ends before
            # it, extended by the link and this stage.
            longer = np.maximum(0.0, over[:, None] + c) if s else 0.0
            grown = t - cap_s + longer
            reached = np.isfinite(total)[:, None]
            there = (grown <= 0) & (c <= 2 * cap_s) & reached
            if self.busy_s:
                there &= self.busy_s[s] <= cap_s
            summed = total[:, None] + t + c
            spare = np.where(there, np.maximum(grown, -cap_s), 0.0)
            target = grown if np.isinf(share) else summed + share * spare
            best = np.where(there, target, np.inf).argmin(0)
            at = best, np.arange(len(best))
            over = grown[at]
            total = np.where(there[at], summed[at], np.inf)
            came.append(best)
        if not np.isfinite(total[0]):
            return None
        places = [0]
        for begins in reversed(came):
            places.append(int(begins[places[-1]]))
        return tuple(reversed(places))
