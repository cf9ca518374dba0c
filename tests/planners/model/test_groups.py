"""Seconds and bytes of stages of several devices, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jvpipe.cost.costs import Costs
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.local_segments import computing_again
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.shapes import Shape
from jvpipe.planners.model.stage_cost import check, evaluate_decision, once_s
from tests.planners.joint.shapes import chain, flat, layer, shapes_of, stages_of

LAYERS = [layer(1.0, 100, 10), layer(2.0, 400, 20), layer(3.0, 0, 30)]
COSTS = chain(LAYERS, [8, 16], batch=2)
SHAPES = shapes_of(COSTS, flat(4, 4.0), 24)


def test_a_stage_takes_its_largest_share_and_its_all_reduce() -> None:
    first, last = stages_of(SHAPES, (Shape(((0, 1, 2), (3,)), 8), (0, 2, 3)))
    # shares of 3 examples at most; 2 (2/3) of 500 bytes at 4 a second; 64 bytes through one
    # network, twice
    assert (first.forward_s, first.backward_s, first.comm_s) == (3 * 1.5, 3 * 3.0, 0)
    assert first.reduce_s == pytest.approx(2 * (2 / 3) * 500 / 4)
    assert (last.forward_s, last.backward_s, last.reduce_s) == (12, 24, 0)
    assert last.comm_s == pytest.approx(2 * 64 / 4)
    in_flight = 2 * 3 * 15
    assert in_flight < 3 * 400
    # a cotangent may wait; beside its own, a third replica holds the gradients of two, and their
    # sum
    assert first.peak_bytes == 2 * 500 + 3 * 8 + 3 * 400


def test_replicas_share_the_optimizers_state_out() -> None:
    layers = [replace(x, optimizer_bytes=70, state_bytes=60) for x in LAYERS]
    costs = chain(layers, [8, 16], batch=2)
    with_state = shapes_of(costs, flat(4, 4.0), 24)
    for places, held in ((((0, 1),), 30 + 120), (((0,),), 30 + 180)):
        path = Shape(places, 4), (0, 3)
        peaks = [stages_of(shapes, path)[0].peak_bytes for shapes in (with_state, SHAPES)]
        # one has two layers, the other one; the rest is everybody's
        assert peaks[0] - peaks[1] == held


def test_what_the_last_backward_hides_of_an_all_reduce() -> None:
    path = Shape(((0, 1),), 4), (0, 3)
    after = stages_of(SHAPES, path)[0].reduce_s
    during = stages_of(shapes_of(COSTS, flat(4, 4.0), 24, overlaps=True), path)[0].reduce_s
    # backwards of 6, 4, 2 s, the last layer's first; reduces of 0, 100, 25 s
    assert after == pytest.approx(125)
    assert during == pytest.approx(125 - 2)
    problem = shapes_of(COSTS, flat(4, 4.0), 24, overlaps=True).problem(path[0])
    least_s = Segments(problem).block(0, np.array([0]), np.array([3])).once_s.item()
    assert least_s == pytest.approx(125 - (2 + 4 + 6)), "what all backwards could hide"


def test_computing_again_takes_a_forward_more_and_keeps_less() -> None:
    path = Shape(((0,),), 2), (0, 3)
    again_costs = replace(COSTS, costs=tuple(map(computing_again, COSTS.costs)))
    kept = stages_of(SHAPES, path)[0]
    again = stages_of(shapes_of(again_costs, flat(4, 4.0), 24), path)[0]
    assert again.compute_s == kept.compute_s + 6
    assert again.peak_bytes < kept.peak_bytes


def test_segments_count_a_group_as_its_stage_is_counted() -> None:
    sizes = {"optimizer_bytes": 70, "state_bytes": 60, "temporary_bytes": 9}
    layers = [replace(x, **sizes, update_s=float(i)) for i, x in enumerate(LAYERS)]
    shapes = shapes_of(chain(layers, [8, 16], batch=2), flat(4, 4.0), 24)
    problem = shapes.problem(Shape(((0, 1), (2, 3)), 6))
    segments, cuts = Segments(problem), np.arange(4)
    kept = KeepAll(problem, cuts)
    for cut in (1, 2):
        stages = evaluate_decision(problem, Decision.keeping_all((0, cut, 3))).stages
        for s, (i, j) in enumerate(((0, cut), (cut, 3))):
            block = segments.block(s, cuts, cuts)
            assert block.compute_s[i, j] == pytest.approx(stages[s].compute_s)
            assert block.once_s[i, j] == pytest.approx(once_s(problem, stages[s]))
            assert block.comm_s[i, j] == pytest.approx(stages[s].comm_s)
            # what replicas are surely spared of the state is no more than what they are spared
            assert kept.peak_bytes(s)[i, j] >= stages[s].peak_bytes
            assert kept.peak_bytes(s)[i, j] <= stages[s].peak_bytes + 60


def test_choices_are_those_of_the_stages_own_costs() -> None:
    problem = SHAPES.problem(Shape(((0, 1), (2,)), 4))
    with pytest.raises(ValueError, match="layer 0 has 1 options, option 1 was chosen"):
        check(problem, Decision((0, 2, 3), (1, 0, 0)))


def test_groups_without_costs_work_on_whole_micro_batches() -> None:
    costs = Costs(tuple(LAYERS))
    plain = Problem(costs, 2, SHAPES.model.schedule, 4)
    grouped = plain.told_apart([(), (1.0, 2.0, 1.0)], [], numbers=[5, 7])
    assert grouped.costs_of(0) is grouped.costs_of(1) is costs
    assert grouped.where == ((5,), (7,))
