"""Tables of segments, and bounds of them, against `stage_cost` of each."""

import numpy as np
import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.planners.joint.cut_windows import Reach, area, bounded
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.model import crossings, spans
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision, once_s, stage_cost
from tests.planners.small import chain, limited, problems, works_with


@settings(max_examples=25, deadline=None)
@given(problems(most_layers=6))
def test_blocks_hold_what_stage_cost_says(problem: Problem) -> None:
    found, n = Segments(problem), len(problem.costs.layers)
    for s in range(problem.stages):
        cuts = np.arange(n + 1)
        block = found.block(s, cuts[:-1], cuts[1:])
        for i, j in zip(*np.nonzero(np.triu(np.ones((n, n)))), strict=True):
            i, j = int(i), int(j) + 1
            cost, at = stage_cost(problem, s, i, j, [0] * n), (i, j - 1)
            layers = problem.costs.layers[i:j]
            held = cost.in_flight * sum(
                layer.options[0].kept_bytes + layer.input_bytes for layer in layers
            )
            assert (
                block.fixed_bytes[at] + held + works_with(problem, i, j, [0] * n)[1]
                == cost.peak_bytes
            )
            assert block.shared_bytes[at] == found.given(i)[:j].sum()
            assert found.row(s, i).fixed_bytes[0, j] == block.fixed_bytes[at]
            assert block.compute_s[at] == pytest.approx(cost.compute_s)
            assert block.forward_s[at] == pytest.approx(cost.forward_s)
            assert block.once_s[at] == pytest.approx(once_s(problem, cost))
            assert block.comm_s[at] == pytest.approx(cost.comm_s)
            assert block.traffic_s[at] == pytest.approx(cost.link_s)


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=6))
def test_windows_hold_every_plan_that_keeps_the_cap(problem: Problem) -> None:
    pricing = pricing_of(problem)
    solution = solve(problem, pricing)
    if not solution.feasible:
        return
    decision = solution.decision()
    slowest_s = max(stage.seconds for stage in evaluate_decision(problem, decision).stages)
    reach = Reach(pricing)
    assert reach.least_cap_s() <= slowest_s * (1 + 1e-3)
    for bound, window in zip(decision.bounds, reach.windows(slowest_s * (1 + 1e-9)), strict=True):
        assert bound in window


def test_windows_are_thinned_to_so_many_cells() -> None:
    windows = [np.array([0]), np.arange(1, 500), np.arange(200, 900), np.array([1000])]
    thin = bounded(windows, cells=10_000)
    assert area(thin) <= 10_000
    assert [x[0] for x in thin] == [0, 1, 200, 1000]
    assert [x[-1] for x in thin] == [0, 499, 899, 1000]


@pytest.mark.parametrize("share", [None, 0.6])
def test_what_is_kept_in_mind_of_a_long_chain_does_not_grow_with_the_stages(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of layers between which values wait: numbers, not seconds.

    Sums over the first layers are kept once for each stage.
    """
    n, sizes, waiting = 4_000, [], list[spans.Spans]()

    def kept(*pairs: np.ndarray) -> spans.Spans:
        waiting.append(spans.Spans(*pairs))
        return waiting[-1]

    monkeypatch.setattr(crossings, "Spans", kept)
    for stages in (20, 200):
        waiting.clear()
        layers = tuple(
            LayerCost(f"layer{i}", 1.0, 2.0, (Option(8), Option(0, extra_s=0.5))) for i in range(n)
        )
        problem = chain(layers, stages, 2 * stages)
        if share is not None:
            problem = limited(problem, int(share * 8 * n))
        pricing = pricing_of(problem)
        reach = Reach(pricing)
        reach.windows(1.01 * reach.least_cap_s())
        for s in range(stages):
            pricing.segments.fixed_bytes(s, np.array([s]), np.array([n]))
        assert sum(held.size for held in reach._fewest_bytes) <= stages * (n + 1)
        sizes.append(sum(len(every.w) for every in waiting))
    assert sizes[1] <= 2 * sizes[0] <= 400 * n


def test_what_a_stage_takes_is_said_by_its_own_edges() -> None:
    """Of a chain's edges a stage looks at those of its layers, however many there are."""
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(8),)) for i in range(2_000))
    costs = chain(layers, 2).costs
    assert len(list(costs.edges_at(1_000, 1_010))) == 11
