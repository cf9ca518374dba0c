"""Dynamic programs over cuts: one matrix per stage, and a path through all of them.

Legend: the matrix of stage s has a row per place where it may begin and a column per place where it may end; the ends
of a stage are the starts of the next. Places are one per bound, the first and the last included.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

Matrix = Float[np.ndarray, "_ _"]
Places = tuple[int, ...]


def least_sum(matrices: Sequence[Matrix]) -> tuple[float, Places | None]:
    """The least sum on any path, and its places: infinity and None if every path meets an infinite number.

    >>> least_sum([np.array([[1.0, 4.0]]), np.array([[9.0], [2.0]])])
    (6.0, (0, 1, 0))
    """
    best, came = np.zeros(1), []
    for matrix in matrices:
        total = best[:, None] + matrix
        came.append(total.argmin(0))
        best = total[came[-1], np.arange(total.shape[1])]
    if not np.isfinite(best[0]):
        return float("inf"), None
    path = [0]
    for origin in reversed(came):
        path.append(int(origin[path[-1]]))
    return float(best[0]), tuple(reversed(path))


def least_max(matrices: Sequence[Matrix]) -> float:
    """The largest number on the path whose largest number is least.

    >>> least_max([np.array([[1.0, 4.0]]), np.array([[9.0], [2.0]])])
    4.0
    """
    best = np.full(1, -np.inf)
    for matrix in matrices:
        best = np.maximum(best[:, None], matrix).min(0)
    return float(best[0])


def sums_through(matrices: Sequence[Matrix]) -> list[Float[np.ndarray, "_"]]:
    """For every place of every bound, the least sum of a path through it."""
    ahead, behind = [np.zeros(1)], [np.zeros(1)]
    for matrix in matrices:
        ahead.append((ahead[-1][:, None] + matrix).min(0))
    for matrix in reversed(matrices):
        behind.append((matrix + behind[-1]).min(1))
    return [a + b for a, b in zip(ahead, reversed(behind), strict=True)]
