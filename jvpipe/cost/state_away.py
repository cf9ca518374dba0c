"""The bytes of layers whose optimizer state lies on the host between updates."""

from collections.abc import Collection
from dataclasses import replace

from jvpipe.cost.costs import Costs
from jvpipe.ir.fates import UPDATES_HELD
from jvpipe.programs.optimizer import OptimizerCut


def with_state_away(costs: Costs, optimizer: OptimizerCut, away: Collection[int]) -> Costs:
    """Returns the costs of a model without the state that is away, and with room for fetching it.

    A device fetches the state of a few updates at a time (`lowering/prefetch.py`). Which layer of
    the device has the largest depends on the cut, so the model's largest is counted. It is counted
    as a temporary, beside whatever runs, because the first state comes before the last backward.

    Args:
        costs: of whole layers, each with all of its state.
        optimizer: cut for these layers.
        away: the parameters whose state lies on the host.
    """
    sizes = [0] * len(costs.layers)
    for leaf, layer in optimizer.holders:
        state = optimizer.state[leaf]
        if layer is not None and state.parameter in away:
            sizes[layer] += state.array.bytes
    # State comes back layer by layer for the updates, a few layers at a time.
    fetched_bytes = min(UPDATES_HELD * max(sizes), sum(sizes))
    layers = []
    for layer, size in zip(costs.layers, sizes, strict=True):
        remaining = replace(
            layer,
            optimizer_bytes=layer.optimizer_bytes - size,
            state_bytes=layer.state_bytes - size,
            temporary_bytes=layer.temporary_bytes + fetched_bytes,
        )
        layers.append(remaining)
    return replace(costs, layers=tuple(layers))
