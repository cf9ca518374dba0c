"""Finds the narrow positions in a model's list of equations, where it is cut into layers.

A position is between two equations. A value is alive at a position if it is made before the
position and read after it. A position is a good cut if few values are alive, because each of them
must be sent between the two layers. How many are "few" depends on the model, so positions are
compared with their neighbors:

- A position is narrow if no position nearby has fewer live values. Distance is counted in weighted
  operations (products, convolutions, lookups that read a parameter).
- Values that live long (skip connections) do not count.
- A layer has at least one weighted operation.
- If the run of equations between two cuts is still large, as a level of a U-Net may be, the run is
  cut again by itself. Values that enter the run are then not counted.

Whether a position is cut depends only on the equations nearby. So a change to one part of a model
leaves distant layers as they were, and their compiled programs can be used again. If a model gets
very few layers, it is cut again at a finer scale: a position is compared with fewer others, and
more values count as skip connections. The scales and limits are in `LayerEffort`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Var
from jvpipe.trace.jaxprs import bytes_of, variables


@dataclass(frozen=True)
class LayerEffort:
    """How fine the layers are: more layers leave a planner more choices and take longer to compile.

    A plan says how many layers each stage has, so an old plan may not fit after these numbers
    change.

    Attributes:
        scales: pairs (window, skip), from the usual scale to the finest. A position is compared
            with `window` groups of positions (`_narrow`) to either side; a value that lives across
            more than `skip` weighted operations is a skip connection.
        few_layers: a model with fewer layers than this is cut again at the next scale.
        large_operations: a layer with more weighted operations than this is cut again, if possible.
        even: the step to which fractions are rounded when a layer is cut in two. A cut is better if
            its slower half takes a smaller fraction of the layer's seconds. If two fractions round
            to the same multiple of `even`, the cut that sends fewer bytes is better.
    """

    scales: tuple[tuple[int, int], ...] = (
        (6, 12),
        (3, 3),
        (1, 1),
        (0, 0),
    )
    few_layers: int = 6
    large_operations: int = 8
    even: float = 0.05


LAYERS = LayerEffort()


def narrow_cuts(eqns: Sequence[JaxprEqn], weighted: Sequence[bool]) -> list[int]:
    """Returns the positions at which equations are cut; p lies between equations p - 1 and p.

    Args:
        eqns: the equations, in order.
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

    The recursion ends because each run between two cuts is shorter than the whole.

    Args:
        eqns: the equations, in order.
        weighted: marks the weighted operations.
        window: how many groups of positions to either side a group is compared with.
        skip: a value that lives across more weighted operations is a skip connection.
    """
    cuts = _narrow(eqns, weighted, window, skip)
    if not cuts:
        return []
    further = []
    for start, end in pairwise([0, *cuts, len(eqns)]):
        marks = weighted[start:end]
        if sum(marks) > LAYERS.large_operations:
            inside = _cuts_at(eqns[start:end], marks, window, skip)
            further += [start + p for p in inside]
    return sorted([*cuts, *further])


def _narrow(
    eqns: Sequence[JaxprEqn],
    weighted: Sequence[bool],
    window: int,
    skip: int,
) -> list[int]:
    """Returns the narrow positions, at most one between two neighboring weighted operations.

    Args:
        eqns: the equations, in order.
        weighted: marks the weighted operations.
        window: how many groups (see below) to either side a group is compared with.
        skip: a value that lives across more weighted operations is a skip connection.
    """
    # A group is the positions between one weighted operation and the next. Each digit below stands
    # at its position, between two equations:
    #
    #     equations    W a b W c W d      W: a weighted operation
    #     groups        0 0 0 1 1         no cut before the first W or behind the last
    #     alive         2 1 3 2 2         values alive at a position: at least 1 in group 0, 2 in 1
    #
    # If two neighboring groups have equally few live values, both get a cut. So a model of
    # equal layers is cut between any two of its layers.
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
        if fewest[g] > min(nearby):
            continue
        # The cut is at a position with the fewest values. Among several such positions, it is at
        # one with the fewest bytes, and among these at the last.
        narrow = group[count[group] == fewest[g]]
        fewest_bytes = width[narrow].min()
        narrowest = narrow[width[narrow] == fewest_bytes]
        cuts.append(int(narrowest[-1]))
    return cuts


def _alive(
    eqns: Sequence[JaxprEqn],
    seen: np.ndarray,
    skip: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of values that are alive at each position, and their bytes.

    Skip connections are not counted. A scalar counts only in the bytes. A position at which no
    value is alive, such as the one after the loss, counts as having one.

    Args:
        eqns: the equations, in order.
        seen: the number of weighted operations before each position.
        skip: a value that lives across more weighted operations is a skip connection.
    """
    # A value adds 1 at the first position at which it is alive, and subtracts 1 right after the
    # last. The running sum over these differences is the count at each position. This takes one
    # step per value instead of one per value and position:
    #
    #     made by equation 1, last read by 4:    +1 at position 2, -1 at 5: alive at 2, 3 and 4
    born: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for p, eqn in enumerate(eqns):
        # No equation makes the inputs of the loss, so they are not counted.
        read = [var for var in variables(eqn.invars) if var in born]
        last |= dict.fromkeys(read, p)
        born |= dict.fromkeys(eqn.outvars, p)
    count = np.zeros(len(eqns) + 2, int)
    width = np.zeros_like(count)
    for var, end in last.items():
        start = born[var] + 1
        if seen[end] - seen[start] > skip:
            continue
        is_array = bool(_jax.aval(var).shape)
        size = bytes_of(var)
        for at, sign in ((start, 1), (end + 1, -1)):
            count[at] += sign * is_array
            width[at] += sign * size
    alive = np.cumsum(count)[:-1]
    alive_bytes = np.cumsum(width)[:-1]
    return np.maximum(alive, 1), alive_bytes
