"""Paths of shapes with their cuts: they are plans, and the best of few micro-batches is near the
best there is.
"""

from dataclasses import replace

import numpy as np
import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.shape_paths import Ground, paths
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.pins import Pins
from tests.planners.joint.shapes import GPU, chain, every_path, layer, shapes_of, step_s

CLUSTER = Cluster("two", GPU, 2, 2, peer=Link(50.0), network=Link(5.0))
LAYERS = [layer(1.0, 2), layer(2.0, 4), layer(1.5, 40), layer(0.5, 60)]
SHAPES = shapes_of(chain(LAYERS, [6, 3, 1]), CLUSTER, 8)


@pytest.mark.parametrize("size", [8, 4])
def test_paths_are_plans_and_the_best_of_them_is_near_the_best_there_is(size: int) -> None:
    segments, every = LocalSegments(SHAPES), list(every_path(SHAPES))
    found = []
    for order in SHAPES.orders:
        ground = Ground(segments, size, order, (1, 2, 3, 4), np.arange(5))
        for floor_s in (0.0, 5.0, 10.0):
            found += list(paths(ground, 4, floor_s))
    for shape, bounds in found:
        devices = [d for place in shape.places for d in place]
        assert len(set(devices)) == len(devices) <= 4
        assert bounds[0] == 0 < bounds[-1] == 4
        assert len(bounds) == len(shape.places) + 1
    best_s = min(step_s(SHAPES, path) for path in found)
    assert best_s <= 1.05 * min(step_s(SHAPES, path) for path in every if path[0].size == size)


def test_given_replicas_are_those_of_the_paths() -> None:
    shapes = replace(SHAPES, pins=Pins(replicas=(2, 1)))
    ground = Ground(LocalSegments(shapes), 8, (0, 1, 2), (1, 2), np.arange(5))
    assert {shape.replicas for shape, _ in paths(ground, 2, 0.0)} == {(2, 1)}


def test_few_cuts_keep_both_ends_and_where_least_crosses() -> None:
    layers = [layer(1.0, 10)] * 20
    sizes = [1 if i % 5 == 4 else 9 for i in range(19)]
    segments = LocalSegments(shapes_of(chain(layers, sizes), CLUSTER, 8))
    assert segments.few(segments.cuts, 5).tolist() == [0, 5, 10, 15, 20]
    assert segments.few(segments.cuts, 40).tolist() == list(range(21))
