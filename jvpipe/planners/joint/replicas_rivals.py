"""Plans of the papers' planners as plans with replicated stages, to be simulated beside our own."""

from collections.abc import Iterator

from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.published.dapple import dapple
from jvpipe.planners.published.pipedream import pipedream
from jvpipe.planners.published.replica_rules import RULES, as_replicas, one_each

MOST_LAYERS, MOST_DEVICES = 64, 16
"""The papers' programs take seconds for more."""


def straight_rivals(tables: Tables, size: int) -> Iterator[ReplicaPlan]:
    """Yields the plans of PipeDream and DAPPLE with one device for each stage; none where they find none.

    Of many layers, these are cut where the tables' grids are.

    Args:
        tables: of the problem.
        size: examples of a micro-batch.
    """
    cuts = tables.cuts if len(tables.cuts) <= MOST_LAYERS else tables.coarse
    asked = one_each(tables, size, min(tables.problem.devices, len(cuts) - 1), cuts)
    for decide in (pipedream, dapple):
        try:
            yield as_replicas(tables, decide(asked), size)
        except Infeasible:
            continue


def rivals(tables: Tables, size: int) -> Iterator[ReplicaPlan]:
    """Yields their plans with replicas.

    Args:
        tables: of the problem.
        size: examples of a micro-batch.
    """
    if tables.problem.devices <= MOST_DEVICES:
        for decide in RULES.values():
            try:
                plan = decide(tables, size)
            except ValueError:
                continue
            if plan is not None:
                yield plan
