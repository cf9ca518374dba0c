"""Theorem 4.1's range, the binary recursion, and DawnPiper's decisions against the best there
are.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.dawnpiper import BinaryPartition, Halving, dawnpiper
from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.small import chain, limited


def block(kept: int = 4, seconds: float = 3.0, recompute_s: float = 1.0) -> LayerCost:
    return LayerCost(
        "block", seconds / 3, 2 * seconds / 3, (Option(kept), Option(0, extra_s=recompute_s))
    )


def test_the_balanced_bounds_of_two_stages() -> None:
    """Under 1F1B the first stage holds twice as much for each layer: 4 of 12 layers there are as
    much as 8 here.
    """
    search = BinaryPartition(Segments(chain([block()] * 12, 2)))
    assert search.compute_balanced(Halving(0, 12, 0, 1, 2)) == 6
    assert search.memory_balanced(Halving(0, 12, 0, 1, 2)) == 4
    assert list(search.between(Halving(0, 12, 0, 1, 2))) == [6, 5, 4]


def test_the_balanced_bounds_of_groups_of_stages() -> None:
    """Stages of 4, 3, 2, 1 in flight fill to one level with 12, 16, 24 and 48 layers of 100."""
    search = BinaryPartition(Segments(chain([block()] * 100, 4)))
    assert search.compute_balanced(Halving(0, 100, 0, 2, 4)) == 50
    assert search.compute_balanced(Halving(0, 100, 0, 2, 3)) == 67
    assert search.memory_balanced(Halving(0, 100, 0, 2, 4)) == 28
    assert search.memory_balanced(Halving(0, 100, 0, 1, 4)) == 12


def test_parameters_count_by_their_versions() -> None:
    """PipeDream's first of two stages holds two versions and two micro-batches' activations: still
    4 of 12.
    """
    layer = LayerCost("block", 1.0, 2.0, (Option(4),), parameter_bytes=7)
    assert (
        BinaryPartition(Segments(chain([layer] * 12, 2, schedule="pipedream"))).memory_balanced(
            Halving(0, 12, 0, 1, 2)
        )
        == 4
    )
    # With one version, 7 + 2 x 4 here and 7 + 4 there.
    assert (
        BinaryPartition(Segments(chain([layer] * 26, 2))).memory_balanced(Halving(0, 26, 0, 1, 2))
        == 11
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(4, 24),
    st.integers(1, 30),
    st.sampled_from(["1f1b", "pipedream"]),
    st.floats(0.4, 1.0),
)
def test_the_best_bound_of_two_stages_is_in_the_range(
    n: int, kept: int, schedule: str, share: float
) -> None:
    """Theorem 4.1, on chains that meet its conditions, each bound with its memory optimized."""
    problem = chain([block(kept, recompute_s=0.5)] * n, 2, schedule=schedule)
    cb_peak = evaluate_decision(problem, dawnpiper(problem)).peak_bytes
    search = BinaryPartition(Segments(limited(problem, round(share * cb_peak))))
    parts = {b: (search.best(0, b, 0, 1), search.best(b, n, 1, 2)) for b in range(1, n)}
    seconds = {
        b: max(one.seconds, other.seconds) for b, (one, other) in parts.items() if one and other
    }
    best = search.best(0, n, 0, 2)
    assert (best is not None) == bool(seconds)
    if best:
        assert best.seconds == min(seconds.values())
        assert best.ends[0] in search.between(Halving(0, n, 0, 1, 2))


def test_a_bound_between_compute_and_memory_balance_wins() -> None:
    """At 12 of 24 layers the first stage takes 41 s, at 8, memory-balanced, the second 48 s."""
    problem = chain([block()] * 24, 2, memory_limit_bytes=68)
    decision = dawnpiper(problem)
    assert 8 < decision.bounds[1] < 12
    assert evaluate_decision(problem, decision).bottleneck_s == 39.0


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_stages(stages: int) -> None:
    bounds = dawnpiper(chain([block()] * 24, stages)).bounds
    sizes = [b - a for a, b in pairwise(bounds)]
    assert len(sizes) == stages
    assert max(sizes) == -(-24 // stages)


def test_segments_are_looked_up() -> None:
    """phi^log2(S) visits would be millions here; far fewer segments differ."""
    search = BinaryPartition(Segments(limited(chain([block()] * 120, 8), 300)))
    assert search.best(0, 120, 0, 8) is not None
    assert search.best.cache_info().currsize < 5000


def test_of_a_wide_range_the_narrow_bounds_are_tried() -> None:
    layers = [block()] * 400
    problem = chain(layers, 2)
    assert (
        len(BinaryPartition(Segments(chain([block()] * 200, 2))).between(Halving(0, 200, 0, 1, 2)))
        == 200 // 6 + 1
    )
    light = LayerCost("light", 0.01, 0.02, (Option(400),))
    problem = chain([*[light] * 300, *[block(0)] * 300], 2)
    costs = problem.costs
    wide = [e if e.producer % 5 == 0 else type(e)(e.producer, e.readers, 9) for e in costs.edges]
    problem = replace(problem, costs=type(costs)(costs.layers, tuple(wide)))
    search = BinaryPartition(Segments(problem))
    tried = search.between(Halving(0, 600, 0, 1, 2))
    assert len(tried) <= PAPER.bounds
    assert tried[0] == search.compute_balanced(Halving(0, 600, 0, 1, 2))
    assert tried[-1] == search.memory_balanced(Halving(0, 600, 0, 1, 2))
    assert list(tried) == sorted(tried, reverse=True)
    assert sum(b % 5 == 1 for b in tried[1:-1]) > 0.5 * len(tried)
