"""The dynamic program over cuts of a chain: finds the best path through one matrix per stage.

Legend: the matrix of stage s has a row for each cut at which the stage may begin, and a column for
each cut at which it may end. In this file a "place" is the index of a row or column. The columns of
a stage are the rows of the next stage. A path picks one entry of each matrix: it begins at the
first row of the first stage, ends at the last column of the last stage, and begins each stage where
the stage before ends. An entry is infinite if the stage is impossible, for example without layers.

The program keeps, for each place, the best path up to it. This suffices because a sum or a maximum
never becomes smaller if a part of it becomes larger: no path through the place is better than one
that begins with the best path up to it. S stages between n cuts take S n ** 2 steps.

`least_max` needs a first matrix of one row, and a last matrix of one column.

`least_sufficient` finds the least number that suffices, such as the least cap on stages under which
there is a path.
"""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float

Matrix = Float[np.ndarray, "_ _"]
Places = tuple[int, ...]


def least_path(
    matrices: Iterable[Matrix],
    how: np.ufunc,
) -> tuple[float, Places | None]:
    """Finds the best path's total and its places; infinity and None if no path is finite.

    Args:
        matrices: the seconds or bytes of each stage. Each matrix is read once, in order, so that an
            iterator may make them one at a time.
        how: how the total of a path follows from its entries: `np.add` (their sum) or `np.maximum`
            (the largest of them).

    >>> inf = np.inf
    >>> rows = [inf, 3.0, 4.0, 9.0], [inf, inf, 2.0, 6.0], [inf, inf, inf, 5.0], [inf] * 4
    >>> square = np.array(rows)
    >>> least_path([square] * 2, np.maximum)
    (5.0, (0, 2, 3))
    >>> least_path([square] * 3, np.add), least_path([square] * 4, np.add)
    ((10.0, (0, 1, 2, 3)), (inf, None))
    """
    every = iter(matrices)
    best = next(every)[0]
    came = list[np.ndarray]()
    for matrix in every:
        total = how(best[:, None], matrix)
        origins = total.argmin(0)
        came.append(origins)
        best = total[origins, np.arange(total.shape[1])]
    if not np.isfinite(best[-1]):
        return float("inf"), None
    # Follow the best start of each stage, from the last place back to the first.
    path = [len(best) - 1]
    for origin in reversed(came):
        path.append(int(origin[path[-1]]))
    return float(best[-1]), (0, *reversed(path))


def least_sum(matrices: Iterable[Matrix]) -> tuple[float, Places | None]:
    """Returns the least sum on any path, and its places.

    >>> least_sum([np.array([[1.0, 4.0]]), np.array([[9.0], [2.0]])])
    (6.0, (0, 1, 0))
    """
    return least_path(matrices, np.add)


def least_max(matrices: Iterable[Matrix]) -> float:
    """Returns the least value that the largest entry of a path can have.

    >>> least_max([np.array([[1.0, 4.0]]), np.array([[9.0], [2.0]])])
    4.0
    """
    best = np.full(1, -np.inf)
    for matrix in matrices:
        best = np.maximum(best[:, None], matrix).min(0)
    return float(best[0])


def least_sufficient(
    suffices: Callable[[float], bool],
    low: float,
    high: float,
    tolerance: float,
) -> float:
    """Finds nearly the least number that suffices, by halving an interval.

    Args:
        suffices: tells whether a number suffices. Any larger number must suffice too.
        low: a number that is too small, or the least.
        high: a number that suffices.
        tolerance: by how much the result may be above the least, as a share of it.

    >>> least_sufficient(lambda x: x * x >= 2, 0.0, 2.0, 1e-3)
    1.4150390625
    """
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high
