"""The bytes of layers whose optimizer state lies on the host between updates."""

from collections.abc import Collection
from dataclasses import replace

from jvpipe.cost.costs import Costs
from jvpipe.ir.fates import UPDATES_HELD
from jvpipe.programs.optimizer_pieces import OptimizerCut


def with_state_away(costs: Costs, optimizer: OptimizerCut, away: Collection[int]) -> Costs:
    """Returns the costs of a model without the state that is away, and with room for fetching it.

    State that is away is on the host between updates. A device holds the fetched state of at most
    `UPDATES_HELD` updates at a time (`lowering/prefetch.py`). The size of this state depends on
    which layers the device has. This is not known before the model is cut into stages, so each
    update is assumed to have the largest state of any layer. The room counts among the temporary
    bytes of every layer, because state is fetched early, while the last backward may still run.

    Args:
        costs: the costs of the layers, each with all of its state.
        optimizer: the optimizer, cut into pieces for these layers.
        away: the parameters whose state lies on the host.
    """
    sizes = [0] * len(costs.layers)
    for leaf, layer in optimizer.holders:
        state = optimizer.state[leaf]
        if layer is not None and state.parameter in away:
            sizes[layer] += state.array.bytes
    # No more can be fetched than all of the state that is away.
    fetched_bytes = min(UPDATES_HELD * max(sizes), sum(sizes))
    layers = (
        replace(
            layer,
            optimizer_bytes=layer.optimizer_bytes - size,
            state_bytes=layer.state_bytes - size,
            temporary_bytes=layer.temporary_bytes + fetched_bytes,
        )
        for layer, size in zip(costs.layers, sizes, strict=True)
    )
    return replace(costs, layers=tuple(layers))
