"""PipeDream's planner of replicated stages on a cluster, for a given micro-batch size.

The dynamic program itself is in `replication.py`. The paper does not say how to choose the size of
a micro-batch, so callers try several sizes and simulate the plans.
"""

from dataclasses import replace
from itertools import accumulate, pairwise

from jvpipe.papers.replication import replicated
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from jvpipe.planners.model.spans import Cuts


def pipedream_replicas(segments: LocalSegments, size: int) -> Path | None:
    """Finds PipeDream's plan over machines and their devices, with few cuts; None if no plan fits.

    Args:
        segments: the costs of the model's segments.
        size: the examples of a micro-batch.

    Raises:
        ValueError: the devices do not fill whole machines, or there are more devices than pieces
            into which the model can be cut.
    """
    shapes = segments.shapes
    cuts = enough(segments)
    pieces = len(cuts) - 1
    if shapes.devices > pieces:
        raise ValueError(
            f"{shapes.devices} devices: pipedream needs a piece of the model for each device, and "
            f"the model has {pieces} pieces: use at most {pieces} devices, or planner 'jvpipe'"
        )
    found = replicated(one_each(shapes, size, shapes.devices, cuts))
    if found is None:
        return None
    # Stages take the devices in order, machine by machine.
    starts = [0, *accumulate(found.replicas)][:-1]
    shape = Shape.along(
        shapes.orders[0],
        starts,
        found.replicas,
        size,
    )
    return shape, found.bounds


def enough(segments: LocalSegments) -> Cuts:
    """Picks few cuts that leave at least as many pieces as there are devices, if possible.

    If few layers have most of the work, the coarse cuts alone may leave too few pieces.

    Args:
        segments: the costs of the model's segments, with their coarse cuts.
    """
    cuts = segments.coarse
    count = segments.most
    devices = segments.shapes.devices
    while len(cuts) <= devices and count < len(segments.cuts):
        count *= 2
        cuts = segments.few(segments.cuts, count)
    return cuts


def one_each(
    shapes: Shapes,
    size: int,
    stages: int,
    cuts: Cuts,
) -> Problem:
    """Returns the problem with as many stages as devices, one device each.

    Args:
        shapes: the model, its costs and the cluster.
        size: the examples of a micro-batch.
        stages: the number of stages.
        cuts: the bounds at which a stage may begin or end.
    """
    # Layers between two neighboring cuts stay together.
    bounds = [int(cut) for cut in cuts]
    spans = [range(a, b) for a, b in pairwise(bounds)]
    together = tuple(tuple(span) for span in spans if len(span) > 1)
    costs = replace(shapes.local.at(size), together=together)
    cluster = shapes.cluster
    is_one_machine = stages <= cluster.devices_per_machine
    return replace(
        shapes.model,
        costs=costs,
        stages=stages,
        microbatches=shapes.batch // size,
        peer=cluster.peer if is_one_machine else cluster.network,
        peer_uses_host=False,
        cluster=cluster,
    )
