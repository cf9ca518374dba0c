"""What layers hold whose optimizer state lies on the host between updates."""

from collections.abc import Collection
from dataclasses import replace

from jvpipe.cost.costs import Costs
from jvpipe.ir.fates import UPDATES_HELD
from jvpipe.programs.optimizer import OptimizerCut


def with_state_away(costs: Costs, optimizer: OptimizerCut, away: Collection[int]) -> Costs:
    """The costs of a model without the state that is away, and with that of the few updates that a device has it for.

    That is so often the largest of a device (`lowering/prefetch.py`), which depends on the cut: that of the model is
    counted, beside whatever runs, for state comes before the last backward. Never less than there is.

    Args:
        costs: of whole layers, each with all of its state.
        optimizer: cut for these layers.
        away: the parameters whose state lies on the host.
    """
    sizes = [0] * len(costs.layers)
    for leaf, layer in optimizer.holders:
        if layer is not None and optimizer.state[leaf].parameter in away:
            sizes[layer] += optimizer.state[leaf].array.bytes
    held_bytes = min(UPDATES_HELD * max(sizes), sum(sizes))
    layers = (
        replace(
            layer,
            optimizer_bytes=layer.optimizer_bytes - size,
            state_bytes=layer.state_bytes - size,
            temporary_bytes=layer.temporary_bytes + held_bytes,
        )
        for layer, size in zip(costs.layers, sizes, strict=True)
    )
    return replace(costs, layers=tuple(layers))
