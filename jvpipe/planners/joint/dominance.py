"""Choices of a segment's first layers, side by side: how they grow by a layer, and which of them can be forgotten.

Legend: a state is known by six numbers: extra seconds, swapped bytes, bytes held for all micro-batches in flight, the
run of layers computed again that it ends in (its residuals and the inputs between; infinite outside a run), and what is
needed beyond what is held (`working_tiers.py`): the most working bytes less what later layers leave of one
micro-batch, if the run ends here and if it goes on (infinite outside a run). Of two states, one that is nowhere larger
dominates, whatever comes after.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.working_tiers import Tier
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN
from jvpipe.planners.model.segments import sums
from jvpipe.planners.model.stage_bytes import on_device_bytes

States = Float[np.ndarray, "6 _"]
EXTRA, SWAPPED, HELD, RUN, BEYOND, OPEN = range(6)
CHUNK_STATES = 128
EARLIER = np.tri(CHUNK_STATES, k=-1, dtype=bool)

Step = tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]
"""For each state the one that it grew from, and its last layer's choice."""


class Growth:
    """Layers [i, j) on stage s; in a tier, if one is given; with all choices, or those that bytes alone ask for."""

    def __init__(
        self,
        pricing: Pricing,
        s: int,
        i: int,
        j: int,
        tier: Tier | None = None,
        *,
        by_bytes: bool = False,
    ) -> None:
        layers, pricing = slice(i, j), pricing.at(s)
        self.i, self.table, self.in_flight, self.tier = (
            i,
            pricing.choices,
            pricing.segments.in_flight[s],
            tier,
        )
        self.extra_s = pricing.extra_s(s)
        self.high = tier.high if tier else np.inf
        self.held = self.table.held_bytes(self.in_flight, layers)
        self.given = pricing.segments.given(i)[layers]
        every = [np.flatnonzero(allowed) for allowed in self.table.allowed[layers]]
        self.columns = self.table.min_bytes_columns(self.in_flight)[layers] if by_bytes else every
        working = self.table.working_bytes[layers]
        there = self.table.allowed[layers] & (working <= self.high)
        charged = tier.in_run_bytes[layers] if tier else np.zeros(j - i)
        held, left = self.held.copy(), self.table.left_bytes[layers].copy()
        held[:, RECOMPUTE_CHAIN], left[:, RECOMPUTE_CHAIN] = (
            on_device_bytes(self.in_flight, charged),
            charged,
        )
        least, spare, top = (
            np.where(there, x, np.inf).min(1) for x in (held, held - left, held + working)
        )
        self.charged_to_come = to_come(on_device_bytes(self.in_flight, charged))
        self.spare_to_come = to_come(spare - self.given)
        self.most_to_come = np.full(j - i + 1, -np.inf)
        for at in reversed(range(j - i)):
            most = max(top[at] + self.spare_to_come[at + 1], least[at] + self.most_to_come[at + 1])
            self.most_to_come[at] = most

    def begin(self) -> States:
        """The choices of no layers."""
        return np.array([[0.0], [0.0], [0.0], [np.inf], [0.0], [np.inf]])

    def grown(self, states: States, at: int) -> States:
        """Every state with every choice of the next layer, the `at`-th; choices that the tier lacks hold too much."""
        table, layer, columns = self.table, self.i + at, self.columns[at]
        grown = np.empty((6, states.shape[1], len(columns)))
        grown[EXTRA] = states[EXTRA][:, None] + self.extra_s[layer, columns]
        grown[SWAPPED] = states[SWAPPED][:, None] + table.swapped_bytes[layer, columns]
        run = np.full(grown.shape[1:], np.inf)  # what there is of a run while this layer works
        run[:, RECOMPUTE], run[:, RECOMPUTE_CHAIN] = 0.0, states[RUN] + table.input_bytes[layer]
        grown[RUN] = (
            run + table.residual_bytes[layer] if at < len(self.columns) - 1 else np.inf
        )  # the last run ends
        working = np.broadcast_to(table.working_bytes[layer, columns], grown.shape[1:]).copy()
        own = table.temporary_bytes[layer]
        again = [RECOMPUTE, RECOMPUTE_CHAIN]
        working[:, again] = run[:, again] + table.recompute_peak_bytes[layer] + own
        left = table.left_bytes[layer, columns] + self.given[at]
        beyond = np.repeat(states[BEYOND][:, None], len(columns), axis=1)
        beyond[:, RECOMPUTE_CHAIN] = states[OPEN]
        for number, needed in ((BEYOND, working), (OPEN, grown[RUN] + own)):
            grown[number] = np.where(needed <= self.high, np.maximum(beyond - left, needed), np.inf)
        fits = np.isfinite(beyond_held(grown))
        grown[HELD] = np.where(fits, states[HELD][:, None] + self.held[at, columns], np.inf)
        return grown.reshape(6, -1)

    def held_bytes(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """What states hold, but for what is charged to layers to come: of the input of a run a part each."""
        if self.tier is None:
            return states[HELD]
        most = float(self.tier.most_input_bytes[self.i + done - 1])
        share = np.maximum(self.high - states[RUN], 0.0) / max(
            self.high + most, 1.0
        )  # none outside a run
        return states[HELD] - np.minimum(
            on_device_bytes(self.in_flight, most) * share, self.charged_to_come[done]
        )

    def least_bytes(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """What states will take at least, held and beyond, whatever the layers to come choose."""
        beyond = np.maximum(beyond_held(states) + self.spare_to_come[done], self.most_to_come[done])
        return self.held_bytes(states, done) + beyond

    def step(self, kept: Int[np.ndarray, "M"], at: int) -> Step:
        """What the states kept of those that have grown by a layer came from."""
        columns = self.columns[at]
        return kept // len(columns), columns[kept % len(columns)]

    def path(self, steps: Sequence[Step], at: int) -> tuple[int, ...]:
        """The choices of a state."""
        choices = []
        for parents, columns in reversed(steps):
            choices.append(self.table.choice(int(columns[at])))
            at = int(parents[at])
        return tuple(reversed(choices))


def beyond_held(states: np.ndarray) -> np.ndarray:
    """What states need at least beyond what they hold, whether their runs end or go on."""
    return np.minimum(states[BEYOND], states[OPEN])


def to_come(per_layer: np.ndarray) -> np.ndarray:
    """Sums over the last layers, from each on."""
    return sums(per_layer[::-1])[::-1]


def front(states: States) -> Int[np.ndarray, "_"]:
    """The places of the states that no other dominates; of equals, the first."""
    if states.shape[1] <= 1:
        return np.arange(states.shape[1])
    order = np.lexsort(
        states[::-1]
    )  # by extra seconds first, so that a state is dominated by earlier ones only
    best = np.empty(0, dtype=np.int64)
    for begin in range(0, len(order), CHUNK_STATES):
        chunk = order[begin : begin + CHUNK_STATES]
        chunk = chunk[~_dominated(states[:, chunk], states[:, best])]
        own = (
            _below(states[:, chunk], states[:, chunk]) & EARLIER[: len(chunk), : len(chunk)]
        ).any(1)
        best = np.concatenate([best, chunk[~own]])
    return np.sort(best)


def _dominated(states: States, by: States) -> np.ndarray:
    return (
        np.asarray(_below(states, by).any(1))
        if by.shape[1]
        else np.zeros(states.shape[1], dtype=bool)
    )


def _below(states: States, by: States) -> np.ndarray:
    """[a, b]: whether state b of `by` is nowhere larger than state a."""
    below = by[0] <= states[0][:, None]
    for number in range(1, len(states)):
        below &= by[number] <= states[number][:, None]
    return below
