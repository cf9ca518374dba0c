"""Where a model is narrow: the places at which a run of equations is cut into layers.

A cut is good where few values are alive. What "few" means depends on the model, so it is asked locally: a
position is narrow if no position nearby has fewer live values. Distance is counted in weighted
operations (products, convolutions, lookups that read a parameter), values that live long (skip connections) do
not count, and a layer holds at least one weighted operation. Only the neighbourhood decides, so a change far away
leaves a layer, and with it its compiled programs, as it was.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Var
from jvpipe.trace.jaxprs import variables

_WINDOW = 6  # weighted operations to either side that a narrow place is compared with
_SKIP = 12  # a value that lives across more weighted operations is a skip connection


def narrow_cuts(eqns: Sequence[JaxprEqn], weighted: Sequence[bool]) -> list[int]:
    """The positions (between equations p-1 and p) at which `eqns` are cut into layers.

    `weighted` tells for each equation whether it is a weighted operation.
    """
    seen = np.array([0, *accumulate(weighted)])  # weighted operations before each position
    count, width = _alive(eqns, seen)
    starts = [int(np.searchsorted(seen, g)) for g in range(1, seen[-1] + 1)]
    groups = [np.arange(a, b) for a, b in pairwise(starts)]  # positions between two weighted operations
    fewest = [int(count[group].min()) for group in groups]
    cuts = []
    for g, group in enumerate(groups):
        if fewest[g] == min(fewest[max(0, g - _WINDOW) : g + _WINDOW + 1]):
            narrow = group[count[group] == fewest[g]]
            least = width[narrow].min()
            cuts.append(int(narrow[width[narrow] == least][-1]))
    return cuts


def _alive(eqns: Sequence[JaxprEqn], seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per position: the number of values that live across it, skips and scalars left out, and their bytes."""
    born: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for p, eqn in enumerate(eqns):
        last.update((var, p) for var in variables(eqn.invars) if var in born)
        born.update((var, p) for var in eqn.outvars)
    count, width = np.zeros(len(eqns) + 2, int), np.zeros(len(eqns) + 2, int)
    for var, end in last.items():
        start = born[var] + 1
        aval = _jax.aval(var)
        if aval.shape and seen[end] - seen[start] <= _SKIP:
            count[start] += 1
            count[end + 1] -= 1
            size = aval.size * aval.dtype.itemsize
            width[start] += size
            width[end + 1] -= size
    return np.cumsum(count)[: len(eqns) + 1], np.cumsum(width)[: len(eqns) + 1]
