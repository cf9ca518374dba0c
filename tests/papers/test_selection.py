"""A stage while its fates are chosen costs what `stage_cost` says, after every change."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import RECOMPUTE, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.small import chain, limited, problems


@settings(max_examples=50, deadline=None)
@given(problems(most_layers=7), st.data())
def test_a_selection_costs_what_the_judge_says(problem: Problem, data: st.DataObject) -> None:
    n = len(problem.costs.layers)
    s = data.draw(st.integers(0, problem.stages - 1))
    i = data.draw(st.integers(0, n - 1))
    j = data.draw(st.integers(i + 1, n))
    segments = Segments(problem)
    stage = Selection(segments, FateChanges(problem, segments.in_flight[s]), s, i, j)
    for _ in range(4):
        choices = [*[0] * i, *stage.choices, *[0] * (n - j)]
        cost = stage_cost(problem, s, i, j, choices)
        assert stage.peak_bytes == cost.peak_bytes
        assert stage.in_flight * stage.swapped_bytes == cost.host_bytes
        assert stage.compute_s == pytest.approx(cost.compute_s)
        assert stage.link_s() == pytest.approx(cost.link_s)
        assert stage.comm_s == pytest.approx(cost.comm_s)
        assert stage.seconds == pytest.approx(max(cost.seconds, cost.comm_s))
        changes = [
            change
            for layer in stage.layers
            for change in stage.changes.after(layer, stage.choices[layer - i])
        ]
        if changes:
            stage.take(data.draw(st.sampled_from(changes)))


@settings(max_examples=25, deadline=None)
@given(problems(most_layers=7))
def test_crossing_bytes_are_those_of_the_edges(problem: Problem) -> None:
    segments = Segments(problem)
    for bound in range(1, len(problem.costs.layers)):
        crossing = [e for e in problem.costs.edges if e.producer < bound <= max(e.readers)]
        assert segments.crossing_bytes[bound] == sum(
            e.bytes * (1 + e.differentiable) for e in crossing
        )


def test_no_bound_is_inside_a_group() -> None:
    layer = LayerCost("a", 1.0, 1.0, (Option(1),))
    problem = chain([layer] * 6, 2)
    problem = replace(problem, costs=replace(problem.costs, together=((1, 3), (3, 4))))
    assert Segments(problem).cuts.tolist() == [0, 1, 5, 6]


def test_too_few_groups_are_an_error() -> None:
    layer = LayerCost("a", 1.0, 1.0, (Option(1),))
    problem = chain([layer] * 3, 3)
    problem = replace(problem, costs=replace(problem.costs, together=((0, 1),)))
    with pytest.raises(ValueError, match=r"3 stages: .* leave 2 pieces, use at most 2 stages"):
        _ = Segments(problem).cuts


def test_moves_save_bytes_on_the_device() -> None:
    """At two micro-batches in flight a swapped byte is always there, and swapping saves nothing."""
    layer = LayerCost(
        "a",
        1.0,
        1.0,
        (Option(8), Option(0, swapped_bytes=8), Option(0, extra_s=0.5)),
        input_bytes=1,
    )
    problem = chain([layer], 1)
    assert [change.choice for change in FateChanges(problem, 2).after(0, 0)] == [2]
    changes = FateChanges(problem, 5)
    assert [change.choice for change in changes.swaps(0, 0)] == [1]
    assert changes.swaps(0, 0)[0].saved_bytes == (5 - 2) * 8
    assert [change.choice for change in changes.recomputes(0, 0)] == [2]


def test_a_layer_is_run_again_where_no_option_is_as_good() -> None:
    slow = LayerCost("a", 1.0, 1.0, (Option(8), Option(4, extra_s=2.0)))
    assert [change.choice for change in FateChanges(chain([slow], 1), 1).after(0, 0)] == [
        1,
        RECOMPUTE,
    ]
    assert [change.choice for change in FateChanges(chain([slow], 1), 1).recomputes(0, 0)] == [
        RECOMPUTE
    ]
    fast = LayerCost("a", 1.0, 1.0, (Option(8), Option(0, extra_s=1.0, extra_bytes=8)))
    assert [change.choice for change in FateChanges(chain([fast], 1), 1).after(0, 0)] == [1]


def test_moves_stop_when_the_stage_fits() -> None:
    layer = LayerCost("a", 1.0, 1.0, (Option(4), Option(0, extra_s=1.0)))
    problem = limited(chain([layer] * 4, 1), 10)
    segments = Segments(problem)
    stage = Selection(segments, FateChanges(problem, 1), 0, 0, 4)
    stage.spend(
        stage.changes.recomputes, score=lambda change: -change.layer, allowed=lambda _: True
    )
    assert stage.choices == [1, 1, 0, 0]
    assert stage.excess_bytes == 0
