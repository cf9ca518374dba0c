"""Small random problems, and the best there is for them, by trying everything."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, stage_cost
from jvpipe.schedules import find_schedule

SCHEDULES = ("gpipe", "1f1b", "pipedream", "2bw")


@st.composite
def layers(draw: st.DrawFn, name: str) -> LayerCost:
    """A layer that may keep, swap or recompute its residuals, or half of them."""
    kept, forward_s = 2 * draw(st.integers(0, 10)), float(draw(st.integers(1, 6)))
    options = [
        Option(kept),
        Option(kept // 2, swapped_bytes=kept - kept // 2),
        Option(0, swapped_bytes=kept),
        Option(kept // 2, extra_s=forward_s / 4, extra_bytes=2),
        Option(0, extra_s=forward_s * draw(st.sampled_from([0.5, 1.0])), extra_bytes=4),
    ]
    few = draw(st.sampled_from([(0,), (0, 2, 4), (0, 1, 3), (0, 3, 4)]))
    return LayerCost(
        name,
        forward_s,
        draw(st.sampled_from([1.0, 2.0])) * forward_s,
        tuple(options[o] for o in few),
        parameter_bytes=draw(st.integers(0, 4)),
        gradient_bytes=2,
        optimizer_bytes=2,
        input_bytes=draw(st.integers(0, 2)),
        temporary_bytes=draw(st.sampled_from([0, 3])),
        update_s=draw(st.sampled_from([0.0, 1.5])),
    )


@contextmanager
def same_random_state() -> Iterator[None]:
    """Checked annotations look at random elements, which hypothesis does not allow inside
    strategies.
    """
    state = random.getstate()
    yield
    random.setstate(state)


@st.composite
def problems(draw: st.DrawFn, most_layers: int = 5, tight: bool = True) -> Problem:
    """A chain with a skip connection and a shared value, whose limit may or may not bind."""
    with same_random_state():
        n = most_layers - draw(st.integers(0, most_layers - 2))
        size = draw(st.integers(0, 3))
        edges = [Edge(i, (i + 1,), size) for i in range(n - 1)]
        edges += (
            [Edge(0, (1, n - 1), 1, differentiable=False)] if n > 2 and draw(st.booleans()) else []
        )
        shared = (
            (Shared((0, n - 1), 2, per_version=draw(st.booleans())),) if draw(st.booleans()) else ()
        )
        a = draw(st.integers(0, n - 2))
        together = ((a, a + 1),) if n > 3 and draw(st.integers(0, 3)) == 0 else ()
        costs = Costs(
            tuple(draw(layers(f"layer{i}")) for i in range(n)), tuple(edges), shared, together
        )
        stages = min(3, n - len(together)) - draw(st.integers(0, 1))
        links = st.sampled_from([INFINITE, Link(8.0, 0.1), Link(2.0)])
        problem = Problem(
            costs,
            stages,
            find_schedule(draw(st.sampled_from(SCHEDULES))),
            draw(st.integers(1, 6)),
            host=draw(links),
            peer=draw(links),
            peer_uses_host=draw(st.booleans()),
        )
        if not tight:
            return problem
        bounds = draw(st.sampled_from(cuts(problem)))
        most = evaluate_decision(problem, Decision.keeping_all(bounds)).peak_bytes
        least = evaluate_decision(problem, Decision(bounds, (RECOMPUTE,) * n)).peak_bytes
        return limited(problem, round(least + (most - least) * draw(st.floats(-0.1, 1.1))))


def limited(
    problem: Problem, memory_limit_bytes: int | None, host_limit_bytes: int | None = None
) -> Problem:
    """The problem under another limit."""
    return replace(
        problem, memory_limit_bytes=memory_limit_bytes, host_limit_bytes=host_limit_bytes
    )


def chain(
    layers: Sequence[LayerCost],
    stages: int,
    microbatches: int = 8,
    schedule: str = "1f1b",
    **more: Any,
) -> Problem:
    """These layers one after the other, with edges of one byte."""
    edges = tuple(Edge(i, (i + 1,), 1) for i in range(len(layers) - 1))
    return Problem(
        Costs(tuple(layers), edges), stages, find_schedule(schedule), microbatches, **more
    )


def cuts(problem: Problem) -> list[tuple[int, ...]]:
    """All bounds that leave together what must be."""
    n, groups = len(problem.costs.layers), problem.costs.together
    inner = combinations(range(1, n), problem.stages - 1)
    every = [(0, *bounds, n) for bounds in inner]
    return [b for b in every if not any(min(g) < x <= max(g) for g in groups for x in b)]


def best_bottleneck_s(problem: Problem, swap: bool = True, apart: bool = False) -> float:
    """The slowest stage's seconds at its best, over all cuts and choices that fit; infinite if none
    does.
    """

    @cache
    def best_s(s: int, i: int, j: int) -> float:
        return min(
            (c.seconds for c, _ in fitting(problem, s, i, j, swap, apart)), default=float("inf")
        )

    def comm_s(s: int, i: int, j: int) -> float:
        return stage_cost(problem, s, i, j, [0] * len(problem.costs.layers)).comm_s

    return min(
        max(max(best_s(s, i, j), comm_s(s, i, j)) for s, (i, j) in enumerate(pairwise(bounds)))
        for bounds in cuts(problem)
    )


def fitting(
    problem: Problem, s: int, i: int, j: int, swap: bool = True, apart: bool = False
) -> list[tuple[StageCost, tuple[int, ...]]]:
    """Costs and choices of all that fits on stage s with layers [i, j).

    What the busiest layer works with is taken `apart` from all that is held, as AdaPipe counts, or
    as it is.
    """
    n = len(problem.costs.layers)
    free = [
        [
            c
            for c in range(RECOMPUTE, len(layer.options))
            if swap or c == RECOMPUTE or not _swaps(layer.options[c])
        ]
        for layer in problem.costs.layers[i:j]
    ]
    fits = []
    for some in product(*free):
        cost = stage_cost(problem, s, i, j, [*[0] * i, *some, *[0] * (n - j)])
        most, beyond = works_with(problem, i, j, [*[0] * i, *some])
        more = most - beyond if apart else 0
        if (
            problem.memory_limit_bytes is None
            or cost.peak_bytes + more <= problem.memory_limit_bytes
        ):
            fits.append((cost, some))
    return fits


def works_with(problem: Problem, i: int, j: int, choices: Sequence[int]) -> tuple[int, int]:
    """The most that a layer of [i, j) works with, and the most beyond what the layers after it
    leave; no runs.
    """
    most = beyond = left = 0
    for at in reversed(range(i, j)):
        layer, choice = problem.costs.layers[at], choices[at]
        again, option = (
            layer.options[-1],
            Option(0) if choice == RECOMPUTE else layer.options[choice],
        )
        works = option.extra_bytes + layer.temporary_bytes
        if choice == RECOMPUTE:  # its backward makes what the last option drops
            works += again.kept_bytes + again.swapped_bytes + again.extra_bytes
        most, beyond = max(most, works), max(beyond, works - left)
        left += option.kept_bytes + option.swapped_bytes + layer.input_bytes
        for shared in problem.costs.shared:
            here = [reader for reader in shared.layers if i <= reader < j]
            left += shared.bytes if not shared.per_version and here and min(here) == at else 0
    return most, beyond


def _swaps(option: Option) -> bool:
    return option.swapped_bytes > 0 or option.swaps_input


def large(schedule: str, fraction: float) -> Problem:
    """100 unlike layers on 8 stages, and a limit of that fraction of what keeping all takes."""
    rng = np.random.default_rng(0)
    layers = []
    for i in range(100):
        kept, forward_s = int(rng.integers(50, 150)) * 10**6, float(rng.uniform(0.5, 1.5)) * 1e-3
        some = [int(kept * share) for share in rng.uniform(0, 1, 3)]
        options = (
            Option(kept),
            *(Option(kept - x, swapped_bytes=x) for x in some),
            *(Option(kept - x, extra_s=0.8 * forward_s * x / kept, extra_bytes=x) for x in some),
            Option(0, extra_s=forward_s, extra_bytes=kept),
        )
        more = dict.fromkeys(
            ("parameter_bytes", "gradient_bytes", "input_bytes", "temporary_bytes"), 8 * 10**6
        )
        layers.append(LayerCost(f"layer{i}", forward_s, 2 * forward_s, options, **more))
    problem = chain(layers, 8, 32, schedule, host=Link(12e9, 1e-5), peer=Link(12e9, 1e-5))
    keeps = evaluate_decision(
        problem, Decision.keeping_all((0, 12, 25, 37, 50, 62, 75, 87, 100))
    ).peak_bytes
    return limited(problem, int(fraction * keeps))


def checked_bottleneck_s(planner: Callable[[Problem], Decision], problem: Problem) -> float | None:
    """The slowest stage's seconds of a decision that fits; None if there is none: then the limit
    named would do.
    """
    limit = problem.memory_limit_bytes
    assert limit is not None
    decision = error = None
    try:
        decision = planner(problem)
    except Infeasible as raised:
        error = raised
    if error is not None:
        assert error.smallest_limit_bytes > limit
        again = limited(problem, error.smallest_limit_bytes)
        assert evaluate_decision(again, planner(again)).peak_bytes <= error.smallest_limit_bytes
        return None
    assert decision is not None
    evaluation = evaluate_decision(problem, decision)
    assert evaluation.peak_bytes <= limit
    return evaluation.bottleneck_s
