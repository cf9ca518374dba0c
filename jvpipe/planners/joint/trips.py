"""Cuts for slow links: no group of adjacent stages waits longer for its round trips than a cap.

Legend: t is a stage's seconds, c the seconds of the link before it, both ways; T is the cap,
seconds per micro-batch. A micro-batch that stage a has sent on comes back from stage r, r - a + 1
micro-batches later, after

    t_a + c_(a+1) + t_(a+1) + ... + c_r + t_r      at most (r - a + 1) T, for all a <= r

as stage a holds only r - a more in flight than stage r. The most that groups that end with stage r
exceed this by is u_r = t_r - T + max(0, u_(r-1) + c_r): a sum along the path of cuts, so the cuts
of the least u are a shortest path. It must not be above 0. Without other traffic on the links the
least T is a stream's step; in a step with a flush few micro-batches come in such turns, and what
all stages take in sum counts too: so there are paths for several caps, each of a least sum of t + c
+ share x u.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.chain_dp import Matrix


@dataclass(frozen=True)
class Trips:
    """Stages between given cuts, with the seconds of each, and of the link before it.

    No `busy_s` may be above a cap.
    """

    seconds: Sequence[Matrix]
    comm_s: Sequence[Matrix]
    busy_s: Sequence[Matrix] = ()

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yields the places of cuts worth a look; each path once."""
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
        """Finds nearly the least cap under which there are cuts; infinite if there are none."""
        # No stage is slower than the slowest, nor is a link: with that cap all is allowed.
        caps = []
        for matrices in (self.seconds, self.comm_s, self.busy_s):
            slowest = (x[np.isfinite(x)].max(initial=0.0) for x in matrices)
            caps.append(max(slowest, default=0.0))
        low = 0.0
        high = sum(caps) + 1e-300
        if self.path(high) is None:
            return np.inf
        # A larger cap allows all that a smaller one does.
        while high - low > CUTS.trip_tolerance * high:
            middle = (low + high) / 2
            if self.path(middle) is not None:
                high = middle
            else:
                low = middle
        return high

    def path(self, cap_s: float, share: float = np.inf) -> tuple[int, ...] | None:
        """Finds the cuts of the least sum under a cap, `share` times u included, if any exist.

        Without a share it is the path of the least u: if that is too long, all are.
        """
        over = np.zeros(1)
        total = np.zeros(1)
        came = list[np.ndarray]()
        for s, (t, c) in enumerate(zip(self.seconds, self.comm_s, strict=True)):
            # By how much the groups that end with this stage exceed the cap: the group of this
            # stage alone, or the worst group before it, longer by the link and this stage.
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
