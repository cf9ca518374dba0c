"""Finds cuts for slow links, so that no group of adjacent stages waits long for round trips.

Legend: t_s is the seconds of stage s per micro-batch, c_s the seconds of the link before it in both
directions, and T a cap on the seconds per micro-batch. A round trip through stages a to r takes a
micro-batch forward from stage a to stage r and back:

    stage a     F . . . . B        . is time on links or on later stages
    ...           F . . B
    stage r         F B

Stage a has only r - a more micro-batches in flight than stage r. So at most r - a + 1 micro-batches
can start during one round trip. If one starts every T seconds, the round trip takes no longer than
r - a + 1 times T:

    t_a + c_(a+1) + t_(a+1) + ... + c_r + t_r  <=  (r - a + 1) T      for all a <= r

Let u_r be the most by which the left side exceeds the right side, over all a <= r. Then

    u_r = t_r - T + max(0, u_(r-1) + c_r)

because the worst group is either stage r alone, or the worst group that ends with
stage r - 1, extended by stage r. The path of cuts keeps the cap if u_r <= 0 at every stage.
As u_r never falls when u_(r-1) rises, the path with the least u up to each cut is found
stage by stage, like a shortest path.

If many micro-batches follow each other, the least possible T is the time between two of them. A
step with a flush has few micro-batches, so the sum of t and c over all stages matters too. So paths
are made for several caps, each with a small sum of t + c + share * u. `share` is the weight of u.
The caps and shares are in `CutEffort` (`effort.py`), and may be changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.chain_dp import Matrix, least_sufficient


@dataclass(frozen=True)
class Trips:
    """The possible stages between given cuts: the seconds of each, and of the link before it.

    `busy_s` are further seconds of the stages, such as those of another link. On a path under a
    cap, none of them is above the cap.
    """

    seconds: Sequence[Matrix]
    comm_s: Sequence[Matrix]
    busy_s: Sequence[Matrix] = ()

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yields the promising paths, some more than once, as the index of each bound's cut."""
        least_s = self.least_cap_s()
        if np.isinf(least_s):
            return
        for cap, share in product(CUTS.trip_caps, CUTS.trip_weights):
            places = self.path(cap * least_s, share)
            if places:
                yield places

    def least_cap_s(self) -> float:
        """Finds nearly the least cap under which there is a path; infinite if there is none."""
        # Every path keeps a cap that is the sum of the slowest stage, the slowest link and the
        # largest `busy_s`.
        high = 1e-300
        for matrices in (self.seconds, self.comm_s, self.busy_s):
            slowest = (x[np.isfinite(x)].max(initial=0.0) for x in matrices)
            high += max(slowest, default=0.0)
        if self.path(high) is None:
            return np.inf
        # Halving the interval is valid, because a larger cap allows all paths of a smaller one.
        return least_sufficient(
            lambda cap_s: self.path(cap_s) is not None,
            0.0,
            high,
            CUTS.trip_tolerance,
        )

    def path(self, cap_s: float, share: float = np.inf) -> tuple[int, ...] | None:
        """Finds a path under a cap with a small sum of t + c + share * u; None if it finds none.

        With an infinite share it is the path with the least u, and None says that no path keeps the
        cap. With any other share, one path is kept per cut, and the result may not be the best.
        """
        over = np.zeros(1)
        total = np.zeros(1)
        came = list[np.ndarray]()
        for s, (t, c) in enumerate(zip(self.seconds, self.comm_s, strict=True)):
            # `grown` is u_r: of this stage alone, or of the worst group before it, extended by the
            # link and this stage.
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
