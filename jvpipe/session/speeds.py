"""Cuts for devices that are not equally fast.

Legend: c[s, i, j] seconds of stage s with layers i to j; T the slowest stage; L layers, S stages.
"""

from collections.abc import Sequence

import numpy as np

_EQUAL = 1 + 1e-9  # sums of floats are not exact


def cuts_at_speeds(layer_s: Sequence[float], slowness: Sequence[float], fixed_s: Sequence[float] = ()) -> list[int]:
    """Layers per stage with the least slowest stage, and of those cuts the ones with the least sum of all stages.

    Two dynamic programs over contiguous cuts, each O(S L^2), exact: one for T, one for the sum within T.

    Args:
        layer_s: seconds of each layer on a device as it should be.
        slowness: how many times longer the device of each stage takes.
        fixed_s: seconds of each stage whatever its layers are.

    >>> cuts_at_speeds([1.0] * 6, [1.0, 1.0]), cuts_at_speeds([1.0] * 6, [1.0, 2.0])
    ([3, 3], [4, 2])
    """
    total = np.concatenate([[0.0], np.cumsum(layer_s)])
    fixed = fixed_s or [0.0] * len(slowness)
    slowest, _ = _search(total, slowness, fixed, np.inf)
    _, bounds = _search(total, slowness, fixed, slowest * _EQUAL)
    return np.diff(bounds).tolist()


def _search(
    total: np.ndarray, slowness: Sequence[float], fixed_s: Sequence[float], most_s: float
) -> tuple[float, list[int]]:
    """The least slowest stage if any may take as long as it likes, else the least sum of stages within `most_s`."""
    layers, stages = len(total) - 1, len(slowness)
    best = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)  # of the first layers on the first stages
    came: list[np.ndarray] = []
    for s, (slow, fixed) in enumerate(zip(slowness, fixed_s, strict=True)):
        after, source = np.full(layers + 1, np.inf), np.zeros(layers + 1, int)
        for j in range(s + 1, layers - (stages - 1 - s) + 1):
            took = slow * (total[j] - total[:j]) + fixed
            within = np.where(took <= most_s, took, np.inf)
            total_s = np.maximum(best[:j], took) if most_s == np.inf else best[:j] + within
            source[j] = int(total_s.argmin())
            after[j] = total_s[source[j]]
        best = after
        came.append(source)
    bounds = [layers]
    for source in reversed(came):
        bounds.append(int(source[bounds[-1]]))
    return float(best[-1]), bounds[::-1]
