"""Tiny problems whose choices are all tried, runs of several layers recomputed included."""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.lot import Cell
from jvpipe.planners.joint.segment_table import Effort, Table
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, stage_cost
from jvpipe.schedules import find_schedule
from tests.planners.small import limited

EFFORT = Effort(quick=16, thorough=4000, tolerance=1e-9, layers=10**6)


def tiny(seed: int, schedule: str = "1f1b", share: float = 0.5, layers: int = 4) -> Problem:
    """A chain on two stages; its limit lies so far between the least and the most that an even cut
    takes.
    """
    draw, costs = np.random.default_rng(seed), []
    for i in range(layers):
        kept, forward_s = 2 * int(draw.integers(2, 12)), float(draw.integers(1, 6))
        options = (
            Option(kept),
            Option(0, kept),
            Option(kept // 2, 0, forward_s / 4, 3),
            Option(0, 0, forward_s, kept),
        )
        more = dict.fromkeys(("parameter_bytes", "gradient_bytes"), int(draw.integers(0, 5)))
        more |= dict(
            zip(
                ("input_bytes", "temporary_bytes"),
                (int(x) for x in draw.integers(0, 5, 2)),
                strict=True,
            )
        )
        update_s = forward_s / 4
        costs.append(
            LayerCost(f"layer{i}", forward_s, 2 * forward_s, options, **more, update_s=update_s)
        )
    edges = tuple(Edge(i, (i + 1,), int(draw.integers(1, 4))) for i in range(layers - 1))
    link = Link(4.0, 0.25)
    problem = Problem(
        Costs(tuple(costs), edges), 2, find_schedule(schedule), 4, host=link, peer=link
    )
    even = (0, layers // 2, layers)
    most = evaluate_decision(problem, Decision.keeping_all(even)).peak_bytes
    least = evaluate_decision(problem, Decision(even, (RECOMPUTE,) * layers)).peak_bytes
    return limited(problem, round(least + share * (most - least)))


def choices(problem: Problem, i: int, j: int) -> Iterator[list[int]]:
    """All choices of layers [i, j), as a list for all layers."""
    n = len(problem.costs.layers)
    for some in product(
        *(range(RECOMPUTE_CHAIN, len(layer.options)) for layer in problem.costs.layers[i:j])
    ):
        if some[0] != RECOMPUTE_CHAIN and all(
            b != RECOMPUTE_CHAIN or a < 0 for a, b in pairwise(some)
        ):
            yield [0] * i + list(some) + [0] * (n - j)


def every_cost(problem: Problem, s: int, i: int, j: int) -> list[StageCost]:
    """What stage `s` takes with layers [i, j), under each of their choices."""
    return [stage_cost(problem, s, i, j, some) for some in choices(problem, i, j)]


def every_decision(problem: Problem) -> Iterator[Decision]:
    """All decisions on two stages."""
    n = len(problem.costs.layers)
    for cut in range(1, n):
        for first in choices(problem, 0, cut):
            for second in choices(problem, cut, n):
                yield Decision((0, cut, n), (*first[:cut], *second[cut:]))


def settle(table: Table, cell: Cell) -> None:
    """Refines a cell until it is settled."""
    stage, at = table.found(cell)
    while not stage.settled[at]:
        table.refine([cell])
