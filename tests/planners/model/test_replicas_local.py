"""Segments at a local batch."""

import random

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.planners.model.replicas_costs import LocalCosts
from jvpipe.planners.model.replicas_local import Known, Local


def drawn(seed: int, b: int) -> Costs:
    """Six layers with edges, one of them long, and bytes that two layers share; each on a line over the local batch."""
    draw = random.Random(seed)
    grows = lambda: draw.randint(0, 50) + draw.randint(1, 90) * b  # noqa: E731
    layers = tuple(
        LayerCost(
            "layer",
            float(grows()),
            float(grows()),
            (Option(grows()),),
            9,
            7,
            5,
            input_bytes=grows(),
            temporary_bytes=grows(),
        )
        for _ in range(6)
    )
    edges = (*(Edge(i, (i + 1,), grows()) for i in range(5)), Edge(0, (3, 5), grows()))
    return Costs(layers, edges, (Shared((1, 4), grows()), Shared((0, 5), 11, per_version=True)))


@pytest.mark.parametrize("batches", [(4,), (2, 8), (1, 2, 6)])
@pytest.mark.parametrize("b", [3, 5, 8, 20])
def test_segments_take_what_their_layers_take_at_the_local_batch(
    batches: tuple[int, ...], b: int
) -> None:
    cuts = np.array([0, 1, 3, 4, 6])
    for seed in range(3):
        costs = LocalCosts(batches, tuple(drawn(seed, size) for size in batches))
        mine = Local(costs, [Known.of(known, cuts) for known in costs.costs], b, 4)
        alone = LocalCosts((b,), (costs.at(b),))
        there = Local(alone, [Known.of(alone.costs[0], cuts)], b, 4)
        assert mine.seconds == pytest.approx(there.seconds)
        assert mine.crossing_bytes == pytest.approx(
            there.crossing_bytes, abs=8
        )  # those are of rounded bytes
        for given in ((1, 8, 1), (2, 8, 2), (4, 2, 1)):
            assert mine.peak_bytes(*given) == pytest.approx(there.peak_bytes(*given), abs=30)
        some = np.array([1, 4])
        assert mine.at(some).peak_bytes(2, 8, 2)[0, 1] == mine.peak_bytes(2, 8, 2)[1, 3]
