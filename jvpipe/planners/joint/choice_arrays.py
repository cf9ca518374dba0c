"""Every layer's choices as arrays: a row for each layer, a column for each choice.

The columns are the layer's options, then `RECOMPUTE_CHAIN` and `RECOMPUTE`. That order matters:
these constants are -2 and -1, so that a decision's choice is also the index of its column.

Legend: a choice keeps and swaps bytes per micro-batch, makes the layer's backward `own_s` longer,
and needs `working_bytes` while the layer runs. In a run (one `RECOMPUTE`, then `RECOMPUTE_CHAIN`s)
forwards run again together. The working bytes of a run grow from layer to layer: by
`residual_bytes`, and by `input_bytes` from the second layer on. The last layer of a run has
`recompute_peak_bytes` in place of its residuals. A layer adds at least `run_bytes` to a run.
Between the halves of its backward a layer holds `handed_bytes`. They do not depend on the choice,
except for layers whose backward runs in the second half alone.
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
    on_device_bytes,
    option_bytes,
    recompute_peak_bytes,
    recompute_s,
)
from jvpipe.planners.model.stage_cost import handed_bytes

PerChoice = Float[np.ndarray, "N C"]
PerLayer = Float[np.ndarray, "N"]
Columns = Int[np.ndarray, "_"]
Flight = tuple[int, int]
"""A stage's micro-batches in flight, and those between the halves of their backward."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of all layers; `allowed` says which columns a layer has."""

    allowed: Bool[np.ndarray, "N C"]
    kept_bytes: PerChoice
    swapped_bytes: PerChoice
    handed_bytes: PerChoice
    own_s: PerChoice
    forward_s: PerLayer
    working_bytes: PerChoice  # of the two choices that recompute: a lower bound
    residual_bytes: PerLayer
    recompute_peak_bytes: PerLayer
    input_bytes: PerLayer
    temporary_bytes: PerLayer

    @staticmethod
    def of(costs: Costs, swaps: bool = True) -> "Choices":
        """Collects the choices of layers at these costs; `swaps` says whether choices may swap."""
        layers = costs.layers
        shape = len(layers), max(len(layer.options) for layer in layers) + 2
        # Arrays lie in memory column by column, because most queries take the least of each row
        # for all layers at once.
        allowed = np.zeros(shape, dtype=bool, order="F")
        kept, swapped, working, extra, handed = (np.zeros(shape, order="F") for _ in range(5))
        for row, layer in enumerate(layers):
            for c, option in enumerate(layer.options):
                taken = option_bytes(layer, option)
                kept[row, c], swapped[row, c], working[row, c], extra[row, c] = taken
                allowed[row, c] = swaps or taken.swapped == 0
                handed[row, c] = handed_bytes(costs, row, taken)
            for c, left in ((RECOMPUTE, layer.input_bytes), (RECOMPUTE_CHAIN, 0)):
                again = LayerBytes(left, 0, 0, 0.0)
                handed[row, c] = handed_bytes(costs, row, again)
        input_bytes = np.array([float(layer.input_bytes) for layer in layers])
        residual = np.array([float(layer.options[0].kept_bytes) for layer in layers])
        recomputed = np.array([float(recompute_peak_bytes(layer)) for layer in layers])
        temporary = np.array([float(layer.temporary_bytes) for layer in layers])
        kept[:, RECOMPUTE] = input_bytes
        allowed[:, -2:] = True
        extra[:, -2:] = np.array([[recompute_s(layer)] for layer in layers])
        # The lesser of what a layer needs inside a run and what it needs at the end of a run.
        inside = np.minimum(residual, recomputed) + temporary
        working[:, -2:] = inside[:, None]
        return Choices(
            allowed=allowed,
            kept_bytes=kept,
            swapped_bytes=swapped,
            handed_bytes=handed,
            own_s=extra,
            forward_s=np.array([layer.forward_s for layer in layers]),
            working_bytes=working,
            residual_bytes=residual,
            recompute_peak_bytes=recomputed,
            input_bytes=input_bytes,
            temporary_bytes=temporary,
        )

    @property
    def columns(self) -> int:
        """The number of columns."""
        return self.allowed.shape[1]

    def extra_s(self, slowness: Sequence[float] = ()) -> PerChoice:
        """Counts how many seconds longer choices make backwards on a slower device.

        Inside a run a layer takes the seconds of its forward; at the end of a run it takes its
        `own_s`. Every layer is counted as an end first. A `RECOMPUTE_CHAIN` shows that its run did
        not end with the layer before, and adds the difference for that layer.
        """
        slower = np.array(slowness or np.ones(len(self.forward_s)))
        extra_s = self.own_s * slower[:, None]
        beyond_s = slower * (self.forward_s - self.own_s[:, RECOMPUTE])
        extra_s[1:, RECOMPUTE_CHAIN] += beyond_s[:-1]
        return extra_s

    @cached_property
    def left_bytes(self) -> PerChoice:
        """The bytes that choices hold of one micro-batch while later layers run."""
        return self.kept_bytes + self.swapped_bytes

    @cached_property
    def run_bytes(self) -> PerLayer:
        """The least that a layer adds to a run's working bytes; the first adds no input to them."""
        return np.minimum(self.residual_bytes, self.recompute_peak_bytes) + self.input_bytes

    @lru_cache(maxsize=256)  # noqa: B019 - as many as there are problems at hand
    def min_bytes_columns(self, flights: tuple[Flight, ...]) -> tuple[Columns, ...]:
        """Lists for each layer the columns that no other column dominates in bytes."""
        every = slice(0, len(self.input_bytes))
        held_bytes = [self.held_bytes(flight, every) for flight in flights]
        numbers = np.stack([*held_bytes, self.working_bytes, -self.left_bytes])
        # The last two columns, which make runs, are kept in any case.
        numbers = numbers[..., :RECOMPUTE_CHAIN]
        per_layer = []
        for row, there in enumerate(self.allowed[:, :RECOMPUTE_CHAIN]):
            columns = np.flatnonzero(there)
            chosen = numbers[:, row, columns]
            # Entry [a, b]: column b is nowhere worse than a. The first of equal columns stays.
            no_worse = (chosen[:, None, :] <= chosen[:, :, None]).all(0)
            same = no_worse & no_worse.T
            is_better = no_worse & ~same
            is_repeated = np.tril(same, -1)
            beaten = (is_better | is_repeated).any(1)
            runs = [self.columns + RECOMPUTE_CHAIN, self.columns + RECOMPUTE]
            per_layer.append(np.append(columns[~beaten], runs))
        return tuple(per_layer)

    @cached_property
    def least_working_bytes(self) -> PerLayer:
        """The least bytes that a layer needs while it runs, over its choices."""
        return np.where(self.allowed, self.working_bytes, np.inf).min(1)

    def held_bytes(self, flight: Flight, layers: slice) -> PerChoice:
        """Counts the bytes that choices hold on the device for all micro-batches in flight.

        The swapped bytes of at most two micro-batches are on the device at once.
        """
        k, between = flight
        total = on_device_bytes(k, self.kept_bytes[layers], self.swapped_bytes[layers])
        if not between:
            return total
        return total + between * self.handed_bytes[layers]

    def swapped(self, chosen: Sequence[int]) -> PerLayer:
        """Counts the bytes per micro-batch that layers' choices swap."""
        return self.swapped_bytes[np.arange(len(chosen)), np.array(chosen)]

    def choice(self, column: int) -> int:
        """Returns the choice of a decision that a column stands for."""
        return column if column < self.columns + RECOMPUTE_CHAIN else column - self.columns
