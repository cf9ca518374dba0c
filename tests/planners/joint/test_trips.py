"""Cuts that keep round trips short, against all cuts."""

import numpy as np

from jvpipe.planners.joint.trips import Trips


def test_round_trips_are_shortest_paths() -> None:
    """The least cap over all cuts of nine layers on three stages, each group of stages looked at by
    itself.
    """
    rng = np.random.default_rng(0)
    n = 9
    seconds = np.cumsum(np.concatenate([[0.0], rng.uniform(1, 3, n)]))
    t = np.where(np.arange(n + 1)[:, None] < np.arange(n + 1), seconds - seconds[:, None], np.inf)
    c = np.broadcast_to(rng.uniform(0, 8, (n + 1, 1)), t.shape).copy()
    least = np.inf
    for i in range(1, n - 1):
        for j in range(i + 1, n):
            a, b, d = t[0, i], t[i, j], t[j, n]
            groups = (
                a,
                b,
                d,
                (a + c[i, j] + b) / 2,
                (b + c[j, n] + d) / 2,
                (a + c[i, j] + b + c[j, n] + d) / 3,
            )
            least = min(least, max(*groups, c[i, j] / 2, c[j, n] / 2))
    trips = Trips([t[:1], t, t[:, -1:]], [c[:1], c, c[:, -1:]])
    assert least <= trips.least_cap_s() <= least * 1.002
