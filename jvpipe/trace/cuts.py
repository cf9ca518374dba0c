"""The narrow places of a model, at which a run of equations is cut into layers.

A cut is good where few values are alive. What "few" means depends on the model, so it is asked
locally: a position is narrow if no position nearby has fewer live values. Distance is counted in
weighted operations (products, convolutions, lookups that read a parameter), values that live long
(skip connections) do not count, and a layer holds at least one weighted operation. A run that is
still large is cut again on its own, as the levels of a U-Net are: what enters it no longer counts.
Only the neighbourhood decides, so a change far away leaves a layer, and with it its compiled
programs, as it was. Only a model of very few layers is looked at more closely: there a skip of a
few operations is no longer one layer, so that small models can be cut at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Var
from jvpipe.trace.jaxprs import variables


@dataclass(frozen=True)
class LayerEffort:
    """How fine the layers are: more of them leave more to choose, and take longer to compile.

    Attributes:
        scales: how many weighted operations to either side a narrow place is compared with, and
            across how many a value lives at most, except for skip connections: from the usual scale
            to the closest look.
        few_layers: a model of fewer ones is looked at more closely.
        large_operations: a layer of more weighted ones is cut again if it can be.
        even: halves of a layer are as good as others if the slower ones differ by less than this
            share of the layer: then the fewest bytes decide.
    """

    scales: tuple[tuple[int, int], ...] = ((6, 12), (3, 3), (1, 1), (0, 0))
    few_layers: int = 6
    large_operations: int = 8
    even: float = 0.05


LAYERS = LayerEffort()


def narrow_cuts(eqns: Sequence[JaxprEqn], weighted: Sequence[bool]) -> list[int]:
    """Returns the positions at which equations are cut into layers: p is between equations p - 1
    and p.

    Args:
        eqns: in order.
        weighted: marks the weighted operations.
    """
    cuts: list[int] = []
    for window, skip in LAYERS.scales:
        cuts = _cuts_at(eqns, weighted, window, skip)
        if len(cuts) + 1 >= min(LAYERS.few_layers, sum(weighted)):
            break
    return cuts


def _cuts_at(
    eqns: Sequence[JaxprEqn],
    weighted: Sequence[bool],
    window: int,
    skip: int,
) -> list[int]:
    """Returns the cuts at one scale; a run that is still large is cut again by itself.

    It ends: each run between two cuts is shorter than the whole.
    """
    cuts = _narrow(eqns, weighted, window, skip)
    if cuts:
        for a, b in pairwise([0, *cuts, len(eqns)]):
            if sum(weighted[a:b]) > LAYERS.large_operations:
                cuts += [a + p for p in _cuts_at(eqns[a:b], weighted[a:b], window, skip)]
    return sorted(cuts)


def _narrow(
    eqns: Sequence[JaxprEqn],
    weighted: Sequence[bool],
    window: int,
    skip: int,
) -> list[int]:
    """Returns the narrow places: of each group of positions between two weighted operations one, if
    any.

    Args:
        eqns: in order.
        weighted: marks the weighted operations.
        window: how many groups to either side a place is compared with.
        skip: a value that lives across more weighted operations is a skip connection.
    """
    # The positions of a group are those behind one weighted operation and up to the next:
    #
    #     equations    W a b W c W d          W: weighted
    #     groups        0 0 0 1 1             before the first and behind the last W there is no cut
    #     alive        2 1 3 2 2  ->  fewest of group 0: 1, of group 1: 2
    #
    # Two equal neighbours are both narrow, so that models of equal layers are cut between all of
    # them.
    seen = np.array([0, *accumulate(weighted)])  # weighted operations before each position
    count, width = _alive(eqns, seen, skip)
    numbers = range(1, seen[-1] + 1)
    starts = [int(np.searchsorted(seen, g)) for g in numbers]
    groups = [np.arange(a, b) for a, b in pairwise(starts)]
    fewest = [int(count[group].min()) for group in groups]
    cuts = []
    for g, group in enumerate(groups):
        begin = max(0, g - window)
        nearby = fewest[begin : g + window + 1]
        if fewest[g] == min(nearby):
            # Among the places with the fewest values, the last one with the fewest bytes.
            narrow = group[count[group] == fewest[g]]
            narrowest = narrow[width[narrow] == width[narrow].min()]
            cuts.append(int(narrowest[-1]))
    return cuts


def _alive(
    eqns: Sequence[JaxprEqn],
    seen: np.ndarray,
    skip: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns per position the number of values that live across it, and their bytes.

    Skips are left out.

    Scalars count only in bytes. A position across which nothing lives, such as behind the loss,
    counts as one value.

    Args:
        eqns: in order.
        seen: the weighted operations before each position.
        skip: a value that lives across more of them is a skip connection.
    """
    # Liveness by differences: a value adds one where it is born and takes one away behind its last
    # reader, so that all counts are one running sum, at a cost of a step per value instead of one
    # per value and position.
    #
    #     born at 1, last read by 4:    +1 at 2,  -1 at 5     alive across 2, 3 and 4
    born: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for p, eqn in enumerate(eqns):
        last.update((var, p) for var in variables(eqn.invars) if var in born)
        born.update((var, p) for var in eqn.outvars)
    count = np.zeros(len(eqns) + 2, int)
    width = np.zeros_like(count)
    for var, end in last.items():
        start = born[var] + 1
        aval = _jax.aval(var)
        if seen[end] - seen[start] <= skip:
            size = aval.size * aval.dtype.itemsize
            # Differences, which the running sums below turn into numbers per position.
            for at, sign in ((start, 1), (end + 1, -1)):
                count[at] += sign * bool(aval.shape)
                width[at] += sign * size
    return np.maximum(np.cumsum(count)[:-1], 1), np.cumsum(width)[:-1]
