"""The best cuts for stages whose devices are given, of all places where the model may be cut.

Legend as in `replicas_stage.py`; under a cap of t and c, stages being put before those behind them,

    H_s(i) = min over j of t(i, j) + c(i, j) + H_(s+1)(j), and what of all-reduces shows: the most of A(i, j) and what
    showed behind less B(i, j), less c(i, j) / 2

One way is kept for each (s, i), by the sum of both; every one is counted again and simulated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_stage import MOST_FINE, Tables
from jvpipe.planners.model.segments import Grid, between

CAPS = (1.0, 1.01, 1.03, 1.1, 1.3)
"""Caps, as multiples of the least one under which there are cuts."""


class _Stage(NamedTuple):
    """Seconds of all segments as one stage: t and c, B, A, and the most of t and c, infinite where it does not fit."""

    through_s: Grid
    backward_s: Grid
    comm_s: Grid
    reduce_s: Grid
    slowest_s: Grid


def recut(tables: Tables, plan: ReplicaPlan) -> Iterator[ReplicaPlan]:
    """Yields plans of the same devices and micro-batches with other cuts; none if no cuts fit.

    Args:
        tables: of the problem.
        plan: whose cuts are not looked at.
    """
    if plan.stages == 1 or tables.problem.pins.bounds is not None or len(tables.cuts) > MOST_FINE:
        return
    stages = [_stage(tables.fine, plan, s) for s in range(plan.stages)]
    least_s = stages[-1].slowest_s[:, -1]
    for stage in reversed(stages[:-1]):
        least_s = np.maximum(stage.slowest_s, least_s).min(1)
    if np.isfinite(least_s[0]):
        for cap in CAPS:
            bounds = tables.cuts[_under(stages, cap * float(least_s[0]) * (1 + 1e-12))]
            yield ReplicaPlan(tuple(map(int, bounds)), plan.places, plan.size)


def _stage(tables: Tables, plan: ReplicaPlan, s: int) -> _Stage:
    places, cuts = plan.places[s], tables.cuts
    local = tables.local(plan.size, len(places))
    compute_s = tables.fitting_s(plan.size, len(places), plan.stages - s)
    comm_s = np.zeros_like(compute_s)
    if s:
        latency_s, byte_s = tables.way(plan.places[s - 1], places)
        crossing = tables.local(plan.size, 1).crossing_bytes
        comm_s = np.where(crossing > 0, 2 * latency_s + crossing * byte_s, 0.0)
    reduce_s = (
        tables.exposed_s(local, *tables.reduce_rate(places))
        if len(places) > 1
        else np.zeros_like(compute_s)
    )
    backward_s = between(local.backward_s, cuts, cuts)
    return _Stage(compute_s + comm_s, backward_s, comm_s, reduce_s, np.maximum(compute_s, comm_s))


def _under(stages: list[_Stage], cap_s: float) -> Int[np.ndarray, "s"]:
    """The positions of the best cuts under a cap under which there are some."""
    last = stages[-1]
    total_s = np.where(last.slowest_s[:, -1] <= cap_s, last.through_s[:, -1], np.inf)
    shown_s = last.reduce_s[:, -1] - last.comm_s[:, -1] / 2
    rows, ends = np.arange(len(total_s)), []
    for stage in reversed(stages[:-1]):
        every_s = np.where(stage.slowest_s <= cap_s, stage.through_s, np.inf) + total_s
        shown = np.maximum(stage.reduce_s, shown_s - stage.backward_s) - stage.comm_s / 2
        j = (every_s + shown).argmin(1)
        total_s, shown_s = every_s[rows, j], shown[rows, j]
        ends.append(j)
    at = [0]
    for j in reversed(ends):
        at.append(int(j[at[-1]]))
    return np.array([*at, len(rows) - 1])
