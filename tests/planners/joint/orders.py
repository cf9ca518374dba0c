"""Small problems for orders of tasks."""

import random
from dataclasses import replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.schedules import find_schedule
from jvpipe.schedules.schedule import Schedule


def problem_of(
    layers: int,
    devices: int,
    microbatches: int,
    seed: int = 0,
    *,
    link: Link = INFINITE,
    split: bool = True,
) -> Problem:
    """Unlike layers whose backwards can be split, each after the one before; links of their own for
    sends.
    """
    draw = random.Random(seed)
    some = []
    for i in range(layers):
        f, i_s, w_s = (draw.choice([0.5, 1.0, 1.5]) for _ in range(3))
        kept = draw.randint(4, 12)
        halves = SplitCost(i_s, w_s, draw.randint(0, 6), draw.randint(0, 6)) if split else None
        options = (Option(kept), Option(0, extra_s=f, extra_bytes=kept))
        some.append(
            LayerCost(f"layer{i}", f, i_s + w_s, options, 2, 2, 2, 1, 1, halves, update_s=f / 4)
        )
    edges = tuple(Edge(i, (i + 1,), 1) for i in range(layers - 1))
    costs = Costs(tuple(some), edges)
    return Problem(
        costs, devices, find_schedule("1f1b"), microbatches, peer=link, peer_uses_host=False
    )


def placed(problem: Problem, schedule: Schedule) -> tuple[Problem, Decision]:
    """The problem under another schedule, and even cuts for it."""
    stages, n = schedule.stages_on(problem.devices), len(problem.costs.layers)
    bounds = [round(s * n / stages) for s in range(stages + 1)]
    return replace(problem, stages=stages, schedule=schedule), Decision.keeping_all(bounds)


def computing_again(decision: Decision) -> Decision:
    """The same cuts; all but a stage's input is computed again, most of it before the cotangents
    are there.
    """
    begins = set(decision.bounds)
    every = range(len(decision.choices))
    return replace(
        decision, choices=tuple(RECOMPUTE if i in begins else RECOMPUTE_CHAIN for i in every)
    )


def loads_of(problem: Problem, schedule: Schedule, *, again: bool = False) -> Loads:
    """The loads of even cuts; everything is kept, or computed again."""
    other, decision = placed(problem, schedule)
    return Loads.of(other, computing_again(decision) if again else decision)
