"""Paths of shapes with their cuts: they are plans, and the best of few micro-batches is near the best there is."""

import numpy as np

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.shape_paths import Ground, paths
from jvpipe.planners.model.local_segments import LocalSegments, few_cuts
from tests.planners.joint.shapes import GPU, chain, every_path, layer, shapes_of, step_s

CLUSTER = Cluster("two", GPU, 2, 2, peer=Link(50.0), network=Link(5.0))
LAYERS = [layer(1.0, 2), layer(2.0, 4), layer(1.5, 40), layer(0.5, 60)]
SHAPES = shapes_of(chain(LAYERS, [6, 3, 1]), CLUSTER, 8)


def test_paths_are_plans_and_the_best_of_few_micro_batches_is_found() -> None:
    segments, every = LocalSegments(SHAPES), list(every_path(SHAPES))
    for size in (8, 4):
        found = []
        for order in SHAPES.orders:
            ground = Ground(segments, size, order, (1, 2, 3, 4), np.arange(5))
            for cap_s in (15.0, 20.0, 30.0, np.inf):
                found += list(paths(ground, cap_s, 4))
        for shape, bounds in found:
            devices = [d for place in shape.places for d in place]
            assert len(set(devices)) == len(devices) <= 4
            assert bounds[0] == 0 < bounds[-1] == 4
            assert len(bounds) == len(shape.places) + 1
        best_s = min(step_s(SHAPES, path) for path in found)
        assert best_s <= 1.05 * min(step_s(SHAPES, path) for path in every if path[0].size == size)


def test_given_replicas_are_those_of_the_paths() -> None:
    segments = LocalSegments(SHAPES)
    ground = Ground(segments, 8, (0, 1, 2), (1, 2), np.arange(5), replicas=(2, 1))
    assert {shape.replicas for shape, _ in paths(ground, np.inf, 2)} == {(2, 1)}


def test_few_cuts_keep_both_ends_and_where_least_crosses() -> None:
    layers = [layer(1.0, 10)] * 20
    sizes = [1 if i % 5 == 4 else 9 for i in range(19)]
    segments = LocalSegments(shapes_of(chain(layers, sizes), CLUSTER, 8))
    assert few_cuts(segments.kept(8), 5).tolist() == [0, 5, 10, 15, 20]
    assert few_cuts(segments.kept(8), 40).tolist() == list(range(21))
