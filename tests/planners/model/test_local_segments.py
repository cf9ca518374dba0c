"""Segments at each local batch: where nothing is rough, shapes are sought by what stages are
counted by.
"""

from itertools import pairwise

import numpy as np
import pytest

from jvpipe.planners.model.local_segments import LocalSegments, computing_again
from jvpipe.planners.model.shapes import Shape
from tests.planners.joint.shapes import chain, every_path, flat, layer, shapes_of, stages_of

LAYERS = [layer(1.0, 100, 10), layer(2.0, 40, 20), layer(3.0, 0, 30), layer(0.5, 7, 5)]


@pytest.mark.parametrize("limit", [None, 10_000, 700])
def test_segments_take_what_the_stages_of_a_shape_take(limit: int | None) -> None:
    shapes = shapes_of(chain(LAYERS, [8, 16, 4]), flat(4, 4.0), 24, limit)
    segments = LocalSegments(shapes)
    shape = Shape(((0, 1, 2), (3,)), 6)
    for cut in (1, 2, 3):
        stages = stages_of(shapes, (shape, (0, cut, 4)))
        for s, (i, j) in enumerate(((0, cut), (cut, 4))):
            replicas, cost = shape.replicas[s], stages[s]
            seconds = segments.fitting_s(6, replicas, 2 - s)[i, j]
            assert seconds == (
                pytest.approx(cost.compute_s)
                if limit is None or cost.peak_bytes <= limit
                else np.inf
            )
            b = segments.share(6, replicas)
            assert segments.layer_s(b)[1, i:j].sum() == pytest.approx(cost.backward_s)


def test_segments_of_a_chain_hold_what_stages_hold_that_keep_everything() -> None:
    shapes = shapes_of(chain(LAYERS, [8, 16, 4]), flat(4, 4.0), 12)
    segments = LocalSegments(shapes)
    for shape, bounds in every_path(shapes):
        peaks = [stage.peak_bytes for stage in stages_of(shapes, (shape, bounds))]
        for s, ends in enumerate(pairwise(bounds)):
            size, replicas, behind = shape.size, shape.replicas[s], len(peaks) - s
            counted = segments.peak_bytes(size, replicas, behind)[ends]
            # What replicas need to add up gradients may be counted beside what is in flight.
            assert counted == peaks[s] or (replicas > 1 and counted > peaks[s])


def test_what_crosses_is_that_of_the_whole_micro_batch() -> None:
    segments = LocalSegments(shapes_of(chain(LAYERS, [8, 16, 4]), flat(4, 4.0), 24))
    # received and returned: 16 bytes of one example, of 6 examples, both ways
    assert segments.crossing_bytes(6)[2, 4] == 2 * 6 * 16


def test_layers_that_compute_again_keep_their_input_and_take_their_forward_more() -> None:
    option = computing_again(chain(LAYERS, [8, 16, 4]).costs[0]).layers[0].options[0]
    assert (option.kept_bytes, option.extra_s, option.extra_bytes) == (0, 1.0, 10)
