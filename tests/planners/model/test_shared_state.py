"""What replicas are spared of the optimizer's state: for all segments no more than packing gives,
and nearly that.
"""

import numpy as np

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.planners.model.shared_state import spared_bytes, surely_spared_bytes


def test_all_segments_are_spared_what_they_surely_are() -> None:
    rng = np.random.default_rng(0)
    sizes = [int(x) for x in rng.choice([0, 3, 50, 51, 400], size=12)]
    layers = [LayerCost("layer", 1.0, 2.0, (Option(0),), state_bytes=size) for size in sizes]
    cuts = np.arange(13)
    for replicas in (1, 2, 3, 5):
        surely = surely_spared_bytes(layers, cuts, cuts, replicas)
        for i in range(12):
            for j in range(i + 1, 13):
                exactly = spared_bytes(layers[i:j], replicas)
                assert exactly - max(sizes[i:j]) <= surely[i, j] <= exactly
