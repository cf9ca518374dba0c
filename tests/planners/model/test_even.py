"""Even cuts: of layers, give or take one, and of seconds."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.model.even import _least_longest, balanced, even, even_counts
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import check
from jvpipe.schedules import find_schedule
from tests.planners.joint.orders import problem_of
from tests.planners.small import problems

LAYER = LayerCost("layer", 1.0, 2.0, (Option(8),))


def decide(layers: int, stages: int, together: tuple[tuple[int, ...], ...] = ()) -> Decision:
    return even(
        Problem(Costs((LAYER,) * layers, together=together), stages, find_schedule("1f1b"), 4)
    )


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [(6, 3, [2, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_the_first_stages_take_what_is_left_over(layers: int, stages: int, cuts: list[int]) -> None:
    assert even_counts(layers, stages) == cuts
    assert [b - a for a, b in pairwise(decide(layers, stages).bounds)] == cuts


def test_cuts_move_to_the_nearest_place_that_is_free() -> None:
    assert decide(9, 3, ((1, 3), (4, 6))).bounds == (0, 4, 7, 9)
    assert decide(6, 3, ((0, 3),)).bounds == (0, 4, 5, 6)
    assert decide(6, 3, ((2, 5),)).bounds == (0, 1, 2, 6)


def test_too_few_places_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages: layers that must share a stage leave 2 pieces"):
        decide(6, 3, ((1, 5),))


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=8, tight=False))
def test_every_decision_is_valid_and_keeps_all(problem: Problem) -> None:
    decision = even(problem)
    check(problem, decision)
    assert set(decision.choices) == {0}


@pytest.mark.parametrize("seed", range(4))
def test_one_stage_per_device_is_balanced_as_well_as_any(seed: int) -> None:
    problem = problem_of(9, 3, 4, seed)
    layer_s = np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(layer_s[i:j].sum() for i, j in pairwise(bounds))

    every = [(0, *inner, 9) for inner in combinations(range(1, 9), 2)]
    assert slowest(balanced(problem)) == min(map(slowest, every))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.data())
def test_no_bounds_on_unlike_devices_have_a_shorter_longest_stage(
    stages: int, more: int, data: st.DataObject
) -> None:
    n = stages + more
    seconds = st.lists(st.sampled_from([0.5, 1.0, 3.0, 10.0]), min_size=n, max_size=n)
    device_s = np.array([data.draw(seconds) for _ in range(stages)])
    totals = np.pad(device_s.cumsum(1), ((0, 0), (1, 0)))

    def longest_s(bounds: Sequence[int]) -> float:
        spans = enumerate(pairwise(bounds))
        return max(float(totals[s, j] - totals[s, i]) for s, (i, j) in spans)

    every = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    assert longest_s(_least_longest(totals)) == min(map(longest_s, every))


def test_a_slow_device_is_left_a_light_layer() -> None:
    totals = np.array([[0, 1, 2, 12, 13], [0, 5, 10, 60, 65], [0, 1, 2, 12, 13]], dtype=float)
    assert _least_longest(totals) == [0, 1, 2, 4]
