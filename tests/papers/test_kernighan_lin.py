"""Coarsening keeps nests whole; bisection and refinement cut few bytes and balance seconds."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.papers.kernighan_lin import (
    coarse_bounds,
    initial_bounds,
    refine,
)
from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.schedules import find_schedule
from tests.planners.small import cuts, problems


def graph(seconds: Sequence[float], edges: Sequence[Edge], stages: int) -> Problem:
    layers = tuple(LayerCost(f"layer{i}", s, 0.0, (Option(0),)) for i, s in enumerate(seconds))
    return Problem(Costs(layers, tuple(edges)), stages, find_schedule("pipedream"), 8)


def branches(nests: int, size: int = 1) -> list[Edge]:
    """Layer 0, then nests of a head 4n + 1, two branches, and a join 4n + 4."""
    edges = [Edge(0, (1,), size)]
    for at in range(1, 4 * nests, 4):
        edges += [
            Edge(at, (at + 1, at + 2), size),
            Edge(at + 1, (at + 3,), size),
            Edge(at + 2, (at + 3,), size),
        ]
        edges += [Edge(at + 3, (at + 4,), size)]
    return edges[:-1]


def test_backbone_vertices_stay_and_nests_are_merged() -> None:
    problem = graph([1.0] * 13, branches(3), 2)
    total = Segments(problem).compute_s
    # Layer 2 is passed by the edge 1 -> 3, layer 3 by 2 -> 4: a nest between the backbone vertices
    # 1 and 4.
    assert coarse_bounds(problem, range(14), total, 9.0) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13]


def test_a_heavy_nest_is_not_merged_as_a_whole() -> None:
    edges = [Edge(0, (1, 7), 1), *(Edge(i, (i + 1,), 1) for i in range(1, 7))]
    problem = graph([1.0] * 8, edges, 2)
    total = Segments(problem).compute_s
    assert coarse_bounds(problem, range(9), total, 100.0) == [0, 1, 7, 8]
    assert coarse_bounds(problem, range(9), total, 2.0) == [0, 1, 3, 5, 7, 8]


def test_bisection_cuts_where_few_bytes_cross() -> None:
    """Between layers 9 and 10 crosses less than in the middle, and that is within the tolerance."""
    edges = [Edge(i, (i + 1,), 1 if i == 10 else 5) for i in range(19)]
    assert initial_bounds(Segments(graph([1.0] * 20, edges, 2))) == (0, 11, 20)


def test_bisection_does_not_cut_far_from_the_middle() -> None:
    edges = [Edge(i, (i + 1,), 1 if i == 14 else 5) for i in range(19)]
    assert initial_bounds(Segments(graph([1.0] * 20, edges, 2))) == (0, 10, 20)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6, 7, 8, 12])
def test_any_number_of_stages_is_balanced(stages: int) -> None:
    bounds = initial_bounds(
        Segments(graph([1.0] * 24, [Edge(i, (i + 1,), 1) for i in range(23)], stages))
    )
    sizes = [b - a for a, b in pairwise(bounds)]
    assert len(sizes) == stages
    assert max(sizes) <= -(-24 // stages) + 1
    assert min(sizes) >= 24 // stages - 1


def test_refinement_walks_into_a_nest_where_seconds_ask_for_it() -> None:
    total = np.array([0.0, 1, 2, 3, 4, 5, 6])
    crossing = np.array([0.0, 1, 9, 9, 9, 1, 0])
    assert refine([0, 1, 6], range(7), [0, 1, 5, 6], total, crossing) == (0, 3, 6)
    # A bound that is as good within the tolerance, and cuts less, is taken.
    total = np.array([0.0, 1, 2, 3, 3.1, 5, 6])
    assert refine([0, 1, 6], range(7), [0, 1, 5, 6], total, np.array([0.0, 9, 9, 9, 1, 9, 0])) == (
        0,
        4,
        6,
    )
    assert PAPER.imbalance * 3 >= 3.1 - 3


@settings(max_examples=40, deadline=None)
@given(problems(most_layers=8, tight=False))
def test_stages_are_contiguous_and_keep_together_what_must_be(problem: Problem) -> None:
    assert initial_bounds(Segments(problem)) in cuts(problem)
