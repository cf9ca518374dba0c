"""The cheapest way from the first layer to the last in so many stages, by tables of what stages cost.

Legend: a grid's entry (a, b) is the cost of a stage from the a-th to the b-th place where the model may be cut;
infinite is a stage that cannot be. A path's cost is that of its stages joined by `how`: `np.add` or `np.maximum`.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.model.segments import Grid


def best_path(grids: Iterable[Grid], how: np.ufunc) -> list[int] | None:
    """The places of the cheapest path, its first stage's cost in the first grid and so on; None if there is none.

    >>> inf = np.inf
    >>> grid = np.array([[inf, 3.0, 4.0, 9.0], [inf, inf, 2.0, 6.0], [inf, inf, inf, 5.0], [inf] * 4])
    >>> best_path([grid, grid], np.maximum), best_path([grid] * 4, np.add)
    ([0, 2, 3], None)
    """
    best: Grid | None = None
    middles = []
    for grid in grids:
        if best is None:
            best = grid[:1]
        else:
            best, middle = join(best, grid, how)
            middles.append(middle[0])
    assert best is not None, "there is at least one stage"
    if not np.isfinite(best[0, -1]):
        return None
    places = [best.shape[1] - 1]
    for middle in reversed(middles):
        places.append(int(middle[places[-1]]))
    return [0, *reversed(places)]


def join(
    left: Float[np.ndarray, "I K"], right: Float[np.ndarray, "K J"], how: np.ufunc
) -> tuple[Float[np.ndarray, "I J"], Int[np.ndarray, "I J"]]:
    """For row a and column b the least how(left[a, c], right[c, b]) over the places c > a, and that place.

    >>> left, right = np.array([[np.inf, 3.0, 5.0]]), np.array([[np.inf] * 3, [np.inf, np.inf, 4.0], [np.inf] * 3])
    >>> values, middles = join(left, right, np.maximum)
    >>> float(values[0, 2]), int(middles[0, 2])
    (4.0, 1)
    """
    rows, columns = len(left), right.shape[1]
    values = np.full((rows, columns), np.inf)
    middles = np.zeros((rows, columns), dtype=np.int64)
    for a in range(min(rows, columns - 1)):
        ways = how(left[a, a + 1 :, None], right[a + 1 :])
        least = ways.argmin(0)
        values[a], middles[a] = ways[least, np.arange(columns)], least + a + 1
    return values, middles
