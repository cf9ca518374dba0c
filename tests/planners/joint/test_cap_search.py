"""The surrogate's optimum against enumeration of all cuts and all choices, runs of several layers
included.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import (
    StageCost,
    check,
    evaluate_decision,
    stage_cost,
    surrogate,
)
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import choices
from tests.planners.small import SCHEDULES, cuts, limited, problems
from tests.planners.small import chain as small_chain


def enumerated(problem: Problem) -> tuple[float, int]:
    """The least surrogate seconds under the limit, and the least limit that anything keeps."""
    limit = problem.memory_limit_bytes

    @cache
    def best(s: int, i: int, j: int) -> tuple[StageCost | None, int]:
        every = [stage_cost(problem, s, i, j, some) for some in choices(problem, i, j)]
        fits = [cost for cost in every if limit is None or cost.peak_bytes <= limit]
        return min(fits, key=lambda cost: cost.seconds, default=None), min(
            cost.peak_bytes for cost in every
        )

    least_s, smallest = float("inf"), 2**60
    for bounds in cuts(problem):
        stages = [best(s, i, j) for s, (i, j) in enumerate(pairwise(bounds))]
        smallest = min(smallest, max(peak for _, peak in stages))
        costs = [cost for cost, _ in stages if cost is not None]
        if len(costs) == len(stages):
            least_s = min(least_s, surrogate(problem, costs))
    return least_s, smallest


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=5))
def test_small_problems_equal_enumeration(problem: Problem) -> None:
    least_s, smallest = enumerated(problem)
    enough = min_bytes_plan(pricing_of(problem))
    assert evaluate_decision(problem, enough.decision).peak_bytes == enough.bytes == smallest
    if least_s == float("inf"):
        with pytest.raises(Infeasible) as raised:
            jvpipe(problem, refine=False)
        assert raised.value.smallest_limit_bytes == smallest
        return
    decision = jvpipe(problem, refine=False)
    check(problem, decision)
    evaluation = evaluate_decision(problem, decision)
    assert problem.memory_limit_bytes is None or evaluation.peak_bytes <= problem.memory_limit_bytes
    assert evaluation.step_s == pytest.approx(least_s, rel=1e-9)
    assert solve(problem, pricing_of(problem)).bound_s == pytest.approx(least_s, rel=1e-8)


def test_a_stream_of_single_micro_batches_is_bounded_as_any_other() -> None:
    """Its forwards come before its backwards, but a stream's steps overlap: it has one phase."""
    layers = [
        LayerCost(str(i), 1.0, 1.0, (Option(0),), gradient_bytes=2, update_s=1.5 * (i == 2))
        for i in range(3)
    ]
    problem = small_chain(layers, 2, 1, "pipedream")
    least_s, _ = enumerated(problem)
    assert solve(problem, pricing_of(problem)).bound_s == pytest.approx(least_s)


def chain(
    schedule: str, layers: int, stages: int, seed: int, share: float, inputs: bool = True
) -> Problem:
    """Unlike layers that keep, swap or recompute, and a limit of that share of what even cuts
    hold.
    """
    draw = np.random.default_rng(seed)
    drawn = []
    for i in range(layers):
        f, kept = float(draw.uniform(1, 10)), int(draw.integers(50, 200))
        again = Option(0, extra_s=f * float(draw.uniform(0.3, 1)), extra_bytes=kept)
        sizes: dict[str, Any] = {
            name: int(draw.integers(1, 50))
            for name in ("parameter_bytes", "gradient_bytes", "temporary_bytes")
        }
        options = (Option(kept), Option(0, swapped_bytes=kept), again)
        drawn.append(
            LayerCost(
                f"layer{i}",
                f,
                2 * f,
                options,
                **sizes,
                input_bytes=inputs * int(draw.integers(5, 20)),
            )
        )
    edges = tuple(Edge(i, (i + 1,), int(draw.integers(1, 30))) for i in range(layers - 1))
    problem = Problem(
        Costs(tuple(drawn), edges),
        stages,
        find_schedule(schedule),
        2 * stages,
        host=Link(30.0, 0.1),
        peer=Link(50.0),
    )
    even = Decision.keeping_all([layers * s // stages for s in range(stages + 1)])
    return limited(problem, int(share * evaluate_decision(problem, even).peak_bytes))


def least_seconds(problem: Problem, s: int, i: int, j: int) -> StageCost | None:
    """The fewest seconds of a stage, of all selections of three fates per layer side by side: 3 **
    (j - i) of them.
    """
    k, n = (
        problem.schedule.in_flight(problem.stages, problem.microbatches)[s],
        len(problem.costs.layers),
    )
    extra_s, swapped, held, beyond = (np.zeros(1) for _ in range(4))
    for layer in problem.costs.layers[i:j]:
        extra_s = np.add.outer([option.extra_s for option in layer.options], extra_s).ravel()
        swapped = np.add.outer([option.swapped_bytes for option in layer.options], swapped).ravel()
        kept = [
            k * option.kept_bytes + min(k, 2) * option.swapped_bytes for option in layer.options
        ]
        held = np.add.outer(kept, held).ravel()
        works = np.array([option.extra_bytes + layer.temporary_bytes for option in layer.options])
        left = np.array([option.kept_bytes + option.swapped_bytes for option in layer.options])
        beyond = np.maximum(beyond - left[:, None], works[:, None]).ravel()
    nothing = stage_cost(problem, s, i, j, [0] * n)
    fixed = nothing.peak_bytes - held[0] - beyond[0]
    link_s = nothing.link_s + np.where(
        swapped > 0, 2 * (problem.host.latency_s + swapped / problem.host.bytes_per_s), 0
    )
    seconds = np.maximum(nothing.compute_s + extra_s, link_s)
    seconds[fixed + held + beyond > (problem.memory_limit_bytes or 0)] = np.inf
    place = int(seconds.argmin())
    if np.isinf(seconds[place]):
        return None
    picks = [place // 3**at % 3 for at in range(j - i)]
    cost = stage_cost(problem, s, i, j, [0] * i + picks + [0] * (n - j))
    assert cost.seconds == pytest.approx(seconds[place])
    return cost


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000), st.floats(0.35, 0.9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ten_layers_on_three_stages_with_three_fates_equal_enumeration(
    schedule: str, seed: int, share: float
) -> None:
    problem = chain(
        schedule, 10, 3, seed, share, inputs=False
    )  # without inputs runs of several layers save nothing
    least_s = float("inf")
    stage = cache(lambda s, i, j: least_seconds(problem, s, i, j))
    for bounds in cuts(problem):
        stages = [best for s, (i, j) in enumerate(pairwise(bounds)) if (best := stage(s, i, j))]
        if len(stages) == problem.stages:
            least_s = min(least_s, surrogate(problem, stages))
    if least_s == float("inf"):
        with pytest.raises(Infeasible):
            jvpipe(problem, refine=False)
    else:
        assert evaluate_decision(problem, jvpipe(problem, refine=False)).step_s == pytest.approx(
            least_s, rel=1e-9
        )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=4, max_size=40), st.integers(2, 4))
def test_without_a_limit_the_slowest_stage_is_as_fast_as_can_be(
    seconds: list[float], stages: int
) -> None:
    layers = tuple(LayerCost(f"layer{i}", x, 2 * x, (Option(1),)) for i, x in enumerate(seconds))
    decision = jvpipe(Problem(Costs(layers), stages, find_schedule("pipedream"), 8), refine=False)
    least = [float("inf")] * len(seconds) + [0.0]
    for _ in range(stages):
        least = [
            min(
                (max(3 * sum(seconds[i:j]), least[j]) for j in range(i + 1, len(seconds) + 1)),
                default=float("inf"),
            )
            for i in range(len(seconds))
        ] + [float("inf")]
    slowest = max(3 * sum(seconds[i:j]) for i, j in pairwise(decision.bounds))
    assert slowest == pytest.approx(least[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_found_between_windows_is_what_is_found_between_all_cuts(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = chain(schedule, 60, 4, 3, 0.6)
    everywhere = evaluate_decision(problem, jvpipe(problem, refine=False)).step_s
    effort = replace(CUTS, all_cells=0, window_cells=1000)
    monkeypatch.setattr("jvpipe.planners.joint.surrogate.CUTS", effort)
    between = solve(problem, pricing_of(problem))
    assert max(map(len, between.table.cuts)) < 57
    assert between.step_s == pytest.approx(everywhere, rel=5e-3)
    assert between.bound_s <= everywhere * (1 + 1e-9)
