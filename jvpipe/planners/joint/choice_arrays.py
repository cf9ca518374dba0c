"""The choices of fates of all layers as arrays: a row for each layer, a column for each choice.

The columns are the layer's options (`Option` in `costs.py`), then `RECOMPUTE_CHAIN`, then
`RECOMPUTE`. These two constants are -2 and -1. With the columns in this order, a decision's choice
is also the index of its column.

Each choice of a layer has, per micro-batch:

    kept_bytes      bytes that stay on the device between the layer's forward and backward
    swapped_bytes   bytes that go to the host in between
    handed_bytes    bytes held between the two halves of the layer's backward; the same for all
                    choices, unless the whole backward runs in the second half
    working_bytes   bytes needed while the layer runs, in addition to what is held
    own_s           seconds by which the choice makes the layer's backward longer

A run is a layer with `RECOMPUTE` and the layers after it with `RECOMPUTE_CHAIN`. Their forwards run
again together, from the first layer's input, so the working bytes of a run grow from layer to
layer. Each layer adds its `residual_bytes`, and each layer but the first also adds its
`input_bytes`. The last layer of a run works with `recompute_peak_bytes` in place of its residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from jvpipe.cost.costs import Costs
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN
from jvpipe.planners.model.stage_bytes import (
    LayerBytes,
    handed_bytes,
    on_device_bytes,
    option_bytes,
    recompute_peak_bytes,
    recompute_s,
)

PerChoice = Float[np.ndarray, "N C"]
PerLayer = Float[np.ndarray, "N"]
Columns = Int[np.ndarray, "_"]
RUNS = [RECOMPUTE_CHAIN, RECOMPUTE]
"""The choices that every layer has."""
Flight = tuple[int, int]
"""How many micro-batches a stage has in flight, and how many between the halves of a backward."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of all layers. A row of `allowed` marks the choices that its layer has."""

    allowed: Bool[np.ndarray, "N C"]
    kept_bytes: PerChoice
    swapped_bytes: PerChoice
    working_bytes: PerChoice  # a lower bound for the two choices that recompute
    own_s: PerChoice
    handed_bytes: PerChoice
    forward_s: PerLayer
    residual_bytes: PerLayer
    recompute_peak_bytes: PerLayer
    input_bytes: PerLayer
    temporary_bytes: PerLayer

    @staticmethod
    def of(costs: Costs, swaps: bool = True) -> "Choices":
        """Collects the layers' choices.

        Args:
            costs: of the layers.
            swaps: whether options that swap are allowed.
        """
        layers = costs.layers
        columns = max(len(layer.options) for layer in layers) + 2
        # Arrays are stored column by column, because most queries take the least of each row for
        # all layers at once. They are in the order of the attributes.
        allowed = np.zeros((columns, len(layers)), dtype=bool).T
        per_choice = np.zeros((5, columns, len(layers))).transpose(0, 2, 1)
        per_layer = []
        for row, layer in enumerate(layers):
            residual_bytes = layer.options[0].kept_bytes
            again_bytes = recompute_peak_bytes(layer)
            sizes = residual_bytes, again_bytes, layer.input_bytes, layer.temporary_bytes
            per_layer.append((layer.forward_s, *sizes))
            # The next layer's choice decides whether a layer ends its run. The lesser need of the
            # two cases is a lower bound for both.
            working_bytes = min(residual_bytes, again_bytes) + layer.temporary_bytes
            chain = LayerBytes(0, 0, working_bytes, recompute_s(layer))
            again = chain._replace(kept=layer.input_bytes)
            options = [option_bytes(layer, option) for option in layer.options]
            for c, taken in (*enumerate(options), (RECOMPUTE_CHAIN, chain), (RECOMPUTE, again)):
                allowed[row, c] = swaps or taken.swapped == 0
                per_choice[:, row, c] = *taken, handed_bytes(costs, row, taken)
        numbers = np.array(per_layer, dtype=np.float64).T.copy()
        return Choices(allowed, *per_choice, *numbers)

    @cached_property
    def every(self) -> list[Columns]:
        """For each layer, all choices that it has."""
        options = self.allowed[:, :RECOMPUTE_CHAIN]
        return [np.append(np.flatnonzero(there), RUNS) for there in options]

    def extra_s(self, slowness: Sequence[float] = ()) -> PerChoice:
        """Counts the seconds that choices add to backwards on a device.

        The last layer of a run adds its `own_s`. Any other layer of a run adds the seconds of its
        forward. Whether a layer is the last of its run depends on the next layer's choice. So each
        layer of a run is first counted as the last, and each `RECOMPUTE_CHAIN` then adds the
        difference for the layer before it.

        Args:
            slowness: for each layer, by what factor the device is slower; empty: 1 for all layers.
        """
        slower = np.array(slowness or np.ones(len(self.forward_s)))
        extra_s = self.own_s * slower[:, None]
        beyond_s = slower * (self.forward_s - self.own_s[:, RECOMPUTE])
        extra_s[1:, RECOMPUTE_CHAIN] += beyond_s[:-1]
        return extra_s

    @cached_property
    def left_bytes(self) -> PerChoice:
        """The bytes of one micro-batch that each choice leaves behind while later layers run."""
        return self.kept_bytes + self.swapped_bytes

    @cached_property
    def run_bytes(self) -> PerLayer:
        """The least that a layer adds to a run's working bytes if it is not the run's first."""
        return np.minimum(self.residual_bytes, self.recompute_peak_bytes) + self.input_bytes

    @lru_cache(maxsize=256)  # noqa: B019 - at most 256 results stay alive
    def min_bytes_columns(self, flights: tuple[Flight, ...]) -> tuple[Columns, ...]:
        """Lists for each layer the choices that may lead to the fewest bytes.

        A column is left out if another column is nowhere worse: the other one holds no more bytes
        in any flight, needs no more working bytes, and leaves at least as many bytes. Leaving more
        is better here, because what a layer leaves is subtracted from the needs of earlier layers
        (`dominance.py`).

        Args:
            flights: what the stage of the layers has in flight at each moment that matters.
        """
        held_bytes = [self.held_bytes(flight, slice(None)) for flight in flights]
        numbers = np.stack([*held_bytes, self.working_bytes, -self.left_bytes])
        per_layer = []
        for row, choices in enumerate(self.every):
            # The last two columns are always listed, because their needs depend on adjacent layers.
            columns = choices[:RECOMPUTE_CHAIN]
            chosen = numbers[:, row, columns]
            # Entry [a, b] says that column b is nowhere worse than column a. The first of several
            # equal columns stays.
            no_worse = (chosen[:, None, :] <= chosen[:, :, None]).all(0)
            is_better = no_worse & ~no_worse.T
            is_repeated = np.tril(no_worse & no_worse.T, -1)
            beaten = (is_better | is_repeated).any(1)
            per_layer.append(np.append(columns[~beaten], RUNS))
        return tuple(per_layer)

    @cached_property
    def least_working_bytes(self) -> PerLayer:
        """The fewest bytes that any choice of a layer needs while the layer runs."""
        return np.where(self.allowed, self.working_bytes, np.inf).min(1)

    def held_bytes(self, flight: Flight, layers: slice) -> PerChoice:
        """Counts the bytes that choices hold on the device for all micro-batches in flight.

        The swapped bytes of at most two micro-batches are on the device at once
        (`stage_bytes.py`).
        """
        k, between = flight
        total = on_device_bytes(k, self.kept_bytes[layers], self.swapped_bytes[layers])
        return total + between * self.handed_bytes[layers]
