"""The knapsack finds the best recomputation of every segment."""

import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.knapsack import (
    Knapsack,
    Recomputation,
    items,
    working_caps,
)
from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.model.problem import RECOMPUTE, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.small import chain, fitting, limited, problems


def block(kept: int, recompute_s: float, working: int = 0) -> LayerCost:
    return LayerCost(
        "block", 5.0, 5.0, (Option(kept), Option(0, extra_s=recompute_s, extra_bytes=working))
    )


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=4))
def test_every_segment_equals_brute_force(problem: Problem) -> None:
    segments = Segments(problem)
    recomputation = Recomputation(segments)
    n = len(problem.costs.layers)
    for s in range(problem.stages):
        for i in range(n):
            for j in range(i + 1, n + 1):
                fits = fitting(problem, s, i, j, swap=False, apart=True)
                best_s = min((c.recompute_s for c, _ in fits), default=float("inf"))
                assert recomputation.extra_s[s, i, j] == pytest.approx(best_s)
                if recomputation.extra_s[s, i, j] < float("inf"):
                    choices = [*[0] * i, *recomputation.choices(s, i, j), *[0] * (n - j)]
                    cost = stage_cost(problem, s, i, j, choices)
                    assert cost.recompute_s == pytest.approx(recomputation.extra_s[s, i, j])
                    assert (
                        problem.memory_limit_bytes is None
                        or cost.peak_bytes <= problem.memory_limit_bytes
                    )


def test_treatments_to_which_another_is_never_worse_are_left_out() -> None:
    options = (
        Option(8),
        Option(8, extra_s=1.0),
        Option(2, swapped_bytes=6),
        Option(4, extra_s=2.0, extra_bytes=9),
    )
    layer = LayerCost(
        "a", 4.0, 4.0, (*options, Option(5, extra_s=3.0, extra_bytes=2)), input_bytes=1
    )
    left = items(Segments(chain([layer], 1)))[0]
    assert [(x.choice, x.bytes, x.extra_s) for x in left] == [
        (RECOMPUTE, 1, 4.0),
        (3, 5, 2.0),
        (4, 6, 3.0),
        (0, 9, 0.0),
    ]


def test_the_knapsack_is_not_greedy() -> None:
    """12 bytes must go. What saves most per second, 10 bytes for 2.4 s, leaves 6 for 2 s; 6 and 6
    take 4 s.
    """
    layers = [block(10, 2.4), block(6, 2.0), block(6, 2.0)]
    recomputation = Recomputation(Segments(limited(chain(layers, 1), 22 - 12)))
    assert recomputation.extra_s[0, 0, 3] == 4.0
    assert recomputation.choices(0, 0, 3) == [0, 1, 1]


def test_a_cap_on_the_working_bytes_may_pay() -> None:
    """To compute the first layer again takes 20 bytes, more than it saves; the second costs more
    and takes none.
    """
    layers = [block(10, 1.0, working=20), block(10, 3.0)]
    recomputation = Recomputation(Segments(limited(chain(layers, 1), 12)))
    assert recomputation.extra_s[0, 0, 2] == 3.0
    assert recomputation.choices(0, 0, 2) == [0, 1]


def test_caps_on_the_working_bytes_are_thinned() -> None:
    """All that differ on few layers, three on many; each leaves every layer a treatment."""
    layers = [block(10, 1.0, working=10 * i) for i in range(1, 101)]
    few = items(Segments(chain(layers[:5], 1)))
    assert working_caps(few) == [0, 10, 20, 30, 40, 50]
    many = items(Segments(chain([*layers, *layers, *layers], 1)))
    assert working_caps(many) == [0, 500, 1000]


def test_bytes_are_rounded_up_to_quanta() -> None:
    """Ten thousand quanta would be needed: the limit still holds, and at most a quantum per layer
    is lost.
    """
    layers = [block(10**6 + 7 * i + 1, 1.0 + i / 100) for i in range(40)]
    problem = limited(chain(layers, 1), 17_500_000)
    segments = Segments(problem)
    recomputation = Recomputation(segments)
    cost = stage_cost(problem, 0, 0, 40, recomputation.choices(0, 0, 40))
    assert cost.peak_bytes <= 17_500_000
    quantum = Knapsack(items(segments), 10**9, 1, 17_500_000, PAPER.fine_quanta).quantum_bytes
    assert 1 < quantum < 2200 + 1
    assert recomputation.choices(0, 0, 40).count(0) == 17
    assert recomputation.extra_s[0, 0, 40] >= cost.recompute_s


def test_a_common_divisor_is_the_quantum() -> None:
    layers = [block(64 * (1 + i % 5), 1.0) for i in range(20)]
    assert Knapsack(items(Segments(chain(layers, 1))), 0, 1, 10**9, 512).quantum_bytes == 64


def test_without_a_limit_everything_is_kept() -> None:
    recomputation = Recomputation(Segments(chain([block(10, 1.0)] * 5, 2)))
    assert recomputation.extra_s[1, 0, 5] == 0
    assert recomputation.choices(1, 2, 5) == [0, 0, 0]
