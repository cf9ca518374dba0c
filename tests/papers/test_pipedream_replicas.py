"""PipeDream's planner on the devices of a cluster: between which cuts it plans."""

import numpy as np

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.papers.pipedream_replicas import enough, pipedream_replicas
from jvpipe.planners.model.local_segments import LocalSegments
from tests.planners.joint.shapes import GPU, chain, layer, shapes_of


def segments(longest_s: float) -> LocalSegments:
    """Of 48 layers on 16 devices, one of which takes so long and has as many more parameters."""
    layers = [layer(1.0, 1) for _ in range(47)]
    layers.insert(20, layer(longest_s, int(longest_s)))
    cluster = Cluster("two", GPU, 8, 2, peer=Link(1e9), network=Link(1e8))
    return LocalSegments(shapes_of(chain(layers, [1] * 47), cluster, 16))


def test_the_coarse_cuts_are_enough_where_layers_are_alike() -> None:
    alike = segments(1.0)
    assert len(alike.coarse) <= alike.most
    np.testing.assert_array_equal(enough(alike), alike.coarse)


def test_one_layer_with_most_of_the_work_leaves_a_piece_for_each_device_all_the_same() -> None:
    uneven = segments(400.0)
    assert len(uneven.coarse) - 1 < 16
    cuts = enough(uneven)
    assert 16 <= len(cuts) - 1 <= 48
    assert {*uneven.cuts[[0, -1]]} <= {*cuts}
    path = pipedream_replicas(uneven, 1)
    assert path is not None
    shape, _ = path
    assert sum(shape.replicas) == 16
