"""Cuts for devices that are not equally fast.

Legend: T the slowest stage; L layers, S stages.
"""

from collections.abc import Sequence

import numpy as np

from jvpipe.planners.model.chain_dp import least_path

_EQUAL = 1 + 1e-9  # sums of floats are not exact


def cuts_at_speeds(
    layer_s: Sequence[float], slowness: Sequence[float], fixed_s: Sequence[float] = ()
) -> list[int]:
    """Layers per stage with the least slowest stage, and of those cuts the ones with the least sum of all stages.

    Two dynamic programs over contiguous cuts, each O(S L^2), exact: one for T, one for the sum within T.

    Args:
        layer_s: seconds of each layer on a device as it should be.
        slowness: how many times longer the device of each stage takes.
        fixed_s: seconds of each stage whatever its layers are.

    >>> cuts_at_speeds([1.0] * 6, [1.0, 1.0]), cuts_at_speeds([1.0] * 6, [1.0, 2.0])
    ([3, 3], [4, 2])
    """
    total, places = np.concatenate([[0.0], np.cumsum(layer_s)]), np.arange(len(layer_s) + 1)
    each_s = np.where(places > places[:, None], total - total[:, None], np.inf)
    stages = [
        slow * each_s + fixed
        for slow, fixed in zip(slowness, fixed_s or [0.0] * len(slowness), strict=True)
    ]
    most_s = least_path(stages, np.maximum)[0] * _EQUAL
    _, bounds = least_path(
        (np.where(stage_s <= most_s, stage_s, np.inf) for stage_s in stages), np.add
    )
    assert bounds is not None, "there are as many layers as stages need"
    return np.diff(bounds).tolist()
