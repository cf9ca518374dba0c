"""Models above the sizes at which the search once looked less far: against enumeration, and against
all rivals.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest

from experiments.planners.rivals import chain, dense
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.grid import grid


def deep(layers: int, stages: int, schedule: str, seed: int, microbatches: int = 0) -> Problem:
    """A chain of unlike layers on links that take as long as stages do: where it is cut is what
    counts.
    """
    draw = random.Random(seed)
    drawn = []
    for i in range(layers):
        f, kept = draw.uniform(0.1, 2.0), draw.randint(10, 90)
        again = Option(0, extra_s=0.8 * f, extra_bytes=kept)
        drawn.append(
            LayerCost(f"layer{i}", f, 2 * f, (Option(kept), again), 5, 5, 10, input_bytes=3)
        )
    edges = tuple(Edge(i, (i + 1,), draw.choice((1, 3, 9, 27))) for i in range(layers - 1))
    link = Link(20 * stages / layers)
    m = microbatches or 2 * stages
    return Problem(
        Costs(tuple(drawn), edges), stages, find_schedule(schedule), m, host=Link(100.0), peer=link
    )


def step_s(problem: Problem, planner: Callable[[Problem], Decision]) -> float:
    """Simulated seconds of a plan; infinite if it does not fit."""
    try:
        evaluation = evaluate_decision(problem, planner(problem))
    except Infeasible:
        return float("inf")
    fits = problem.memory_limit_bytes is None or evaluation.peak_bytes <= problem.memory_limit_bytes
    return simulated_step_s(problem, evaluation.stages) if fits else float("inf")


@pytest.mark.parametrize(
    ("schedule", "shared", "layers"),
    grid(
        product(("gpipe", "1f1b", "pipedream"), (True, False), (150, 300, 420)),
        ("pipedream", False, 300),
        ("gpipe", True, 420),
    ),
)
def test_two_stages_of_many_layers_on_slow_links_are_cut_where_it_is_best(
    schedule: str, shared: bool, layers: int
) -> None:
    problem = replace(deep(layers, 2, schedule, layers, 3), peer_uses_host=shared)
    every = [Decision.keeping_all((0, cut, layers)) for cut in range(1, layers)]
    least_s = min(
        simulated_step_s(problem, evaluate_decision(problem, decision).stages) for decision in every
    )
    assert step_s(problem, jvpipe) == pytest.approx(least_s, rel=1e-9)


def skipping(schedule: str) -> Problem:
    """Blocks in which each layer reads all before it, on four stages."""
    return replace(deep(10, 4, schedule, 0), costs=dense(3), peer=Link(2e9, 1e-5))


MODELS: dict[str, Callable[[str], Problem]] = {
    "140 layers": lambda schedule: deep(140, 4, schedule, 1),
    "270 layers": lambda schedule: deep(270, 3, schedule, 2),
    "skipping": skipping,
}


@pytest.mark.parametrize(
    ("schedule", "model"),
    grid(
        product(("gpipe", "1f1b", "pipedream"), MODELS),
        ("1f1b", "140 layers"),
        ("gpipe", "270 layers"),
    ),
)
def test_no_other_planner_is_faster_on_slow_links_whatever_the_depth(
    schedule: str, model: str
) -> None:
    problem = MODELS[model](schedule)
    ours_s = step_s(problem, jvpipe)
    for rival in PLANNERS:
        assert ours_s <= step_s(problem, rival.decide) * (1 + 1e-9), rival.name


@pytest.mark.parametrize(
    ("schedule", "layers", "stages", "slow", "share", "most"),
    grid(
        [
            ("2bw", 300, 4, False, 0.5, 1.001),
            ("1f1b", 300, 4, False, 0.5, 1.001),
            ("gpipe", 300, 8, False, 0.7, 1.001),
            ("gpipe", 300, 8, True, 0.7, 1.001),
            ("1f1b", 700, 8, False, 0.5, 1.001),
            ("1f1b", 2000, 8, False, 0.5, 1.001),
        ],
        ("2bw", 300, 4, False, 0.5, 1.001),
        ("1f1b", 300, 4, False, 0.5, 1.001),
    ),
)
def test_dawnpiper_is_not_faster_under_a_limit_however_many_layers_there_are(
    schedule: str, layers: int, stages: int, slow: bool, share: float, most: float
) -> None:
    costs, link = chain(layers, slow)
    problem = Problem(
        costs, stages, find_schedule(schedule), 2 * stages, host=Link(12e9), peer=link
    )
    even = evaluate_decision(problem, find_planner("even").decide(problem)).peak_bytes
    limited = replace(problem, memory_limit_bytes=int(share * even))
    assert step_s(limited, jvpipe) <= most * step_s(limited, find_planner("dawnpiper").decide)


def test_a_tighter_limit_is_never_faster() -> None:
    problem = deep(140, 3, "1f1b", 3)
    even = evaluate_decision(problem, find_planner("even").decide(problem)).peak_bytes
    limits = [int(share * even) for share in (0.6, 0.8, 1.1, 2.0)]
    steps = [step_s(replace(problem, memory_limit_bytes=limit), jvpipe) for limit in limits]
    steps.append(step_s(problem, jvpipe))
    assert all(looser <= tighter * (1 + 1e-9) for tighter, looser in pairwise(steps))
    assert steps[-1] < steps[0]


def test_the_lower_bound_of_balanced_stages_on_slow_links_is_near() -> None:
    """Counting no links it was little more than half of the best there is."""
    for schedule, near in (("pipedream", 1.01), ("gpipe", 1.05), ("1f1b", 1.25)):
        problem = replace(deep(150, 2, schedule, 4, 8), peer_uses_host=False)
        every = [Decision.keeping_all((0, cut, 150)) for cut in range(1, 150)]
        least_s = min(
            simulated_step_s(problem, evaluate_decision(problem, decision).stages)
            for decision in every
        )
        assert lower_bound(problem) <= least_s <= near * lower_bound(problem)


@pytest.mark.parametrize("at", [10, 449])
def test_a_layer_that_alone_is_over_the_limit_leaves_no_plan(at: int) -> None:
    layers = [LayerCost("block", 1.0, 2.0, (Option(8),), 10) for _ in range(450)]
    layers[at] = replace(layers[at], parameter_bytes=10**6)
    costs = Costs(tuple(layers), tuple(Edge(i, (i + 1,), 0) for i in range(449)))
    schedule = find_schedule("1f1b")
    problem = Problem(costs, 8, schedule, microbatches=8, memory_limit_bytes=10**4)
    with pytest.raises(Infeasible, match=f"layers {at} to {at}"):
        jvpipe(problem)
