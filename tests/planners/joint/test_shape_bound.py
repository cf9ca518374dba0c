"""No plan of any shape is below the bound."""

import random

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.local_segments import LocalSegments
from tests.planners.joint.shapes import (
    GPU,
    chain,
    every_path,
    flat,
    layer,
    shapes_of,
    step_s,
)


def test_counts_with_the_same_largest_share_are_one() -> None:
    segments = LocalSegments(shapes_of(chain([layer(1.0)], []), flat(16, 1.0), 16))
    assert segments.counts(16) == (1, 2, 3, 4, 6, 8, 16)
    assert segments.counts(2) == (1, 2)


TWO = Cluster("two", GPU, 2, 2, peer=Link(100.0), network=Link(10.0), networks=2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_no_plan_is_below_the_bound(overlaps: bool) -> None:
    draw = random.Random(0)
    for cluster in (flat(3, 10.0), TWO, flat(3, 1.0)):
        layers = [layer(draw.uniform(0.5, 2.0), draw.randint(0, 50)) for _ in range(4)]
        costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
        shapes = shapes_of(costs, cluster, 6, overlaps=overlaps)
        bound_s = least_step_s(shapes)
        assert all(step_s(shapes, path) >= bound_s * (1 - 1e-9) for path in every_path(shapes))


def test_what_data_parallelism_cannot_be_below_counts_its_all_reduce() -> None:
    costs, reduce_s = chain([layer(1.0, 30)], []), 2 * 3 / 4 * 30 / 10.0
    after, during = (
        least_step_s(shapes_of(costs, flat(4, 10.0), 4, overlaps=overlaps))
        for overlaps in (False, True)
    )
    assert after == pytest.approx(3.0 + reduce_s, rel=1e-3)
    assert during == pytest.approx(reduce_s, rel=1e-3)


def test_the_bound_is_loosened_once_however_many_sizes_there_are() -> None:
    # Whatever the size, a device has the layer of 6 s: replicas would be slow to add up gradients.
    costs = chain([layer(1.0, 1000), layer(2.0, 1000)], [0])
    shapes = shapes_of(costs, flat(2, 1.0), 24)
    assert len(shapes.sizes) > 4
    assert least_step_s(shapes) == pytest.approx(24 * 6.0, rel=1.01 * 2**-16, abs=0)
