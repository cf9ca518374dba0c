"""The choices of one stage's layers that take the fewest seconds under its limit: dominance over what they take.

Legend: a state is the choices of a segment's first layers, known by five numbers: extra seconds, swapped bytes, held
bytes, the run of layers computed again that it ends in (its working bytes; infinite outside a run), and the most
working bytes so far. Of two states, one that is nowhere larger dominates. Each layer multiplies the states by its
choices; out go those that cannot fit, those whose lower bound (`prices.py`) is not below the best known, the dominated.
At last, if there are more than `width`, those of the highest bounds: then the answer may not be the best.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jvpipe.planners.choices import PerChoice
from jvpipe.planners.prices import Pricing
from jvpipe.planners.problem import RERUN, RERUN_ON
from jvpipe.planners.segments import sums
from jvpipe.planners.tiers import Tier

States = Float[np.ndarray, "5 _"]
EXTRA, SWAPPED, HELD, RUN, WORKING = range(5)
CHUNK = 128
EARLIER = np.tri(CHUNK, k=-1, dtype=bool)
OVER = 5
"""How much dearer than its price a byte is that a state will probably be over."""
NEAR = 0.01
"""How near a choice must be to the best to be expected too, relative to an even share of a layer."""
SLACK = 1 - 1e-12
"""A bound must be below the best known by more than rounding."""


@dataclass(frozen=True)
class Asked:
    """Layers [i, j) on stage s; what they take without fates, and the limits that are left for what fates take."""

    s: int
    i: int
    j: int
    compute_s: float
    traffic_s: float
    room_bytes: float
    most_swapped_bytes: float = np.inf  # per micro-batch


@dataclass(frozen=True)
class Fates:
    """Choices of a segment's layers; none, and infinite seconds, if nothing fits. Nothing takes less than `bound_s`."""

    choices: tuple[int, ...]
    seconds: float
    bytes: float  # held and working
    bound_s: float

    @property
    def proven(self) -> bool:
        """Whether these are the best."""
        return self.bound_s >= self.seconds * (1 - 1e-9)


class StageFates:
    """Choices in a tier, under given prices of seconds and bytes."""

    def __init__(self, pricing: Pricing, asked: Asked, tier: Tier, alpha: float = 1.0, mu: float = 0.0) -> None:
        self.asked, self.pricing, self.tier, self.alpha, self.mu = asked, pricing, tier, alpha, mu
        self.host = pricing.segments.problem.host
        self.k = pricing.segments.k[asked.s]
        layers = slice(asked.i, asked.j)
        # Bounds of what the layers to come take.
        extra_s, link_s, held = pricing.table(asked.s, tier, layers)
        there = np.isfinite(extra_s)
        finite_s = np.where(there, extra_s, 0.0)
        cost = np.where(there, alpha * finite_s + (1 - alpha) * link_s + mu * held, np.inf)
        self.cost_to_come = _to_come(cost.min(1))
        self.held_to_come = _to_come(np.where(there, held, np.inf).min(1))
        self.charged_to_come = _to_come(self.k * tier.in_run_bytes[layers])
        self.extra_to_come = _to_come(np.where(there, extra_s, np.inf).min(1))
        self.working_to_come = np.maximum.accumulate([tier.low, *pricing.choices.least_working_bytes[layers][::-1]])[
            ::-1
        ]
        self.expected = self._expected(cost, finite_s, link_s, held)

    def _expected(self, cost: PerChoice, *taken: PerChoice) -> list[np.ndarray]:
        """What the layers to come will probably take: each its best choices, but in sum what the prices stand for."""
        asked, room = self.asked, self.asked.room_bytes - self.working_to_come[0]
        bound_s = (
            self.alpha * asked.compute_s + (1 - self.alpha) * asked.traffic_s + self.cost_to_come[0] - self.mu * room
        )
        near = np.exp((cost.min(1)[:, None] - cost) / max(NEAR * bound_s / len(cost), 1e-300))
        shares = near / near.sum(1)[:, None]
        found = [_to_come((shares * x).sum(1)) for x in taken]
        binding = (self.alpha > 0, self.alpha < 1, self.mu > 0)
        wholes = (bound_s - asked.compute_s, bound_s - asked.traffic_s, room)
        return [
            x * (max(whole, 0.0) / x[0]) if binds and x[0] > 0 else x
            for x, whole, binds in zip(found, wholes, binding, strict=True)
        ]

    def least_seconds(self, width: int, below_s: float = np.inf) -> Fates:
        """The choices of the fewest seconds, among those that fit and take less than `below_s`.

        Of equals, the one that swaps least, then the one of the fewest bytes.
        """
        asked, table = self.asked, self.pricing.choices
        held = table.held_bytes(self.k, slice(asked.i, asked.j))
        states = np.array([[0.0], [0.0], [0.0], [np.inf], [0.0]])
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        dropped_s = np.inf
        for at in range(asked.j - asked.i):
            columns = np.flatnonzero(table.allowed[asked.i + at])
            states = self._grown(states, asked.i + at, columns, held[at])
            bound = self._bounds(states, at + 1)
            alive = bound < below_s * SLACK
            if alive.sum() > 2 * width:
                fittest = self._fittest(states, bound, at + 1, width)
                left = alive.copy()
                left[fittest] = False
                dropped_s = min(dropped_s, float(bound[left].min(initial=np.inf)))
                alive &= ~left
            alive = np.flatnonzero(alive)
            alive = alive[_front(states[:, alive])]
            states = states[:, alive]
            if not len(alive):
                return Fates((), np.inf, np.inf, dropped_s)
            steps.append((alive // len(columns), columns[alive % len(columns)]))
        seconds = self._seconds(states)
        best = int(np.lexsort((states[HELD] + states[WORKING], states[SWAPPED], seconds))[0])
        found_s = float(seconds[best])
        used = float(states[HELD, best] + states[WORKING, best])
        return Fates(self._path(steps, best), found_s, used, min(found_s, dropped_s))

    def _grown(self, states: States, layer: int, columns: np.ndarray, held: np.ndarray) -> States:
        """Every state with every choice of the next layer."""
        table = self.pricing.choices
        grown = np.empty((5, states.shape[1], len(columns)))
        grown[EXTRA] = states[EXTRA][:, None] + table.extra_s[layer, columns]
        grown[SWAPPED] = states[SWAPPED][:, None] + table.swapped_bytes[layer, columns]
        grown[HELD] = states[HELD][:, None] + held[columns]
        grown[RUN] = np.inf
        working = np.broadcast_to(table.working_bytes[layer, columns], grown.shape[1:]).copy()
        grown[RUN, :, RERUN] = table.residual_bytes[layer]
        grown[RUN, :, RERUN_ON] = states[RUN] + table.residual_bytes[layer] + table.input_bytes[layer]
        working[:, RERUN_ON] = grown[RUN, :, RERUN_ON] + table.temporary_bytes[layer]
        grown[WORKING] = np.maximum(states[WORKING][:, None], working)
        return grown.reshape(5, -1)

    def _bounds(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """What a state will take at least; infinite if it cannot fit."""
        asked = self.asked
        working = np.maximum(states[WORKING], self.working_to_come[done])
        held = states[HELD] - self._paid_ahead(states, done)
        fits = (held + self.held_to_come[done] + working <= asked.room_bytes) & (working <= self.tier.high)
        fits &= states[SWAPPED] <= asked.most_swapped_bytes
        compute_s = asked.compute_s + states[EXTRA]
        link_s = asked.traffic_s + 2 * self._swap_s(states)
        priced = self.alpha * compute_s + (1 - self.alpha) * link_s + self.cost_to_come[done]
        if self.mu:
            priced = priced + self.mu * (held + np.where(fits, working, 0.0) - asked.room_bytes)
        return np.where(fits, np.maximum.reduce([compute_s + self.extra_to_come[done], link_s, priced]), np.inf)

    def _fittest(self, states: States, bound: np.ndarray, done: int, width: int) -> np.ndarray:
        """The states to go on with: half of them by bounds, half by how near they are to the relaxation's shares."""
        extra_s, link_s, held = (expected[done] for expected in self.expected)
        working = np.maximum(states[WORKING], self.working_to_come[done])
        over = states[HELD] - self._paid_ahead(states, done) + held + working - self.asked.room_bytes
        compute_s = self.asked.compute_s + states[EXTRA] + extra_s
        link_s = self.asked.traffic_s + 2 * self._swap_s(states) + link_s
        may = np.isfinite(bound)
        dear_s = OVER * self.mu * np.maximum(np.where(may, over, 0.0), 0.0)
        expected_s = np.where(may, np.maximum(compute_s, link_s) + dear_s, np.inf)
        near, low = (np.argpartition(x, width)[:width] for x in (expected_s, bound))
        return np.concatenate([near, low, [np.where(may, states[HELD] + working, np.inf).argmin()]])

    def _paid_ahead(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """Of the input that a run has kept, what its layers to come are charged too."""
        most, high = float(self.tier.most_input_bytes[self.asked.i + done - 1]), self.tier.high
        share = np.maximum(high - states[RUN], 0.0) / max(high + most, 1.0)  # none outside a run
        return np.minimum(self.k * most * share, self.charged_to_come[done])

    def _seconds(self, states: States) -> Float[np.ndarray, "M"]:
        return np.maximum(self.asked.compute_s + states[EXTRA], self.asked.traffic_s + 2 * self._swap_s(states))

    def _swap_s(self, states: States) -> Float[np.ndarray, "M"]:
        swapped = states[SWAPPED]
        return np.where(swapped > 0, self.host.latency_s + swapped / self.host.bytes_per_s, 0.0)

    def _path(self, steps: list[tuple[np.ndarray, np.ndarray]], at: int) -> tuple[int, ...]:
        found = []
        for parents, columns in reversed(steps):
            found.append(self.pricing.choices.choice(int(columns[at])))
            at = int(parents[at])
        return tuple(reversed(found))


def _to_come(per_layer: np.ndarray) -> np.ndarray:
    """Sums over the last layers, from each on."""
    return sums(per_layer[::-1])[::-1]


def _front(states: States) -> np.ndarray:
    """The places of the states that no other dominates; of equals, the first."""
    if states.shape[1] <= 1:
        return np.arange(states.shape[1])
    order = np.lexsort(states[::-1])  # by extra seconds first, so that a state is dominated by earlier ones only
    front = np.empty(0, dtype=np.int64)
    for begin in range(0, len(order), CHUNK):
        chunk = order[begin : begin + CHUNK]
        chunk = chunk[~_dominated(states[:, chunk], states[:, front])]
        own = (_below(states[:, chunk], states[:, chunk]) & EARLIER[: len(chunk), : len(chunk)]).any(1)
        front = np.concatenate([front, chunk[~own]])
    return np.sort(front)


def _dominated(states: States, by: States) -> np.ndarray:
    return np.asarray(_below(states, by).any(1)) if by.shape[1] else np.zeros(states.shape[1], dtype=bool)


def _below(states: States, by: States) -> np.ndarray:
    """[a, b]: whether state b of `by` is nowhere larger than state a."""
    below = by[0] <= states[0][:, None]
    for number in range(1, 5):
        below &= by[number] <= states[number][:, None]
    return below
