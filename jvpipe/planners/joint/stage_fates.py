"""The search for the fastest choices of a device's layers under its limit, by dominance.

A state (see `dominance.py`) stands for choices of the first layers. Each further layer multiplies
the states by its choices. Then states are dropped that cannot fit, whose lower bound
(`dual_bounds.py`) is not below the best known, or that another state dominates. None of these can
be the best. If more than twice `width` states are left, only the fittest stay: then the answer may
not be the best.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from jvpipe.planners.joint.choice_arrays import PerChoice
from jvpipe.planners.joint.dominance import (
    EXTRA,
    MOST,
    SWAPPED,
    Growth,
    Lot,
    States,
    beyond_held,
    follow,
    to_come,
)
from jvpipe.planners.joint.dual_bounds import DualBounds, Pricing, Relaxation
from jvpipe.planners.joint.effort import FATE

BELOW_FACTOR = 1 - 1e-12
"""A bound must be below the best known by more than rounding."""


@dataclass(frozen=True)
class FateQuery:
    """The layers of a device, their seconds without extra ones, and the limits that fates keep."""

    lot: Lot
    compute_s: float
    traffic_s: float
    room_bytes: float
    most_swapped_bytes: float = np.inf  # per micro-batch


@dataclass(frozen=True)
class StageChoices:
    """Choices for the layers of a device; empty, with infinite seconds, if none were found to fit.

    No choices that fit take less than `bound_s`.
    """

    choices: tuple[int, ...]
    seconds: float
    bytes: float  # held and working
    bound_s: float

    @property
    def proven(self) -> bool:
        """Whether these choices are the fastest."""
        return self.bound_s >= self.seconds * (1 - 1e-9)


class FateSearch:
    """A search for a query, under given prices of seconds and bytes, or under the best prices.

    If the lot has several moments, prices are put on one of them, the one that holds the most if
    everything is kept. All moments have to fit.
    """

    def __init__(
        self,
        pricing: Pricing,
        query: FateQuery,
        prices: tuple[float, float] | None = None,
    ) -> None:
        self.query = query
        self.host = pricing.segments.problem.host
        self.growth = growth = Growth(pricing, query.lot)
        table = pricing.choices
        at = growth.at
        there = table.allowed[at]
        extra_s = np.where(there, growth.extra_s[at], np.inf)
        link_s = 2 * table.swapped_bytes[at] / self.host.bytes_per_s
        base = np.array(query.lot.base_bytes)
        keeping = base + growth.held[..., 0].sum(1)
        self.moment = int(keeping.argmax())
        held_bytes = growth.held[self.moment]
        self.room = query.room_bytes - base[self.moment]
        # Bytes are at least what all layers hold plus what the last layer works with.
        last = np.zeros_like(held_bytes)
        last[-1] = table.working_bytes[at[-1]]
        if prices is None:
            asked = Relaxation(
                extra_s,
                link_s,
                held_bytes + last,
                self.room,
                query.compute_s,
                query.traffic_s,
            )
            prices = DualBounds([asked]).solve()[0]
        self.prices = self.alpha, self.mu = prices
        # Lower bounds of the cost of the layers to come, at these prices.
        finite_s = np.where(there, extra_s, 0.0)
        seconds = self.alpha * finite_s + (1 - self.alpha) * link_s
        cost = np.where(there, seconds, np.inf)
        priced = cost + self.mu * held_bytes
        paid = priced.min(1)
        # While an earlier layer works, the layers to come have left nothing of its micro-batch.
        left = table.left_bytes[at]
        others = cost + self.mu * (held_bytes - left)
        spared = others.min(1) - self.mu * growth.given
        with_last = cost + self.mu * (held_bytes + last)
        self.cost_to_come = to_come(with_last.min(1))
        self.paid_to_come = to_come(paid)
        self.spare_to_come = growth.until_end(spared, paid)
        self.extra_to_come = to_come(extra_s.min(1))
        self.last_bytes = float(table.least_working_bytes[at[-1]])
        self.expected = self._expected(priced, finite_s, link_s, held_bytes, left)

    def _expected(self, cost: PerChoice, *taken: PerChoice) -> list[np.ndarray]:
        """Estimates what the layers to come take, by weighting choices that cost little.

        The estimates are scaled so that over all layers they agree with the bound at these prices:
        a price above 0 says that its seconds or its limit are met exactly.

        Args:
            cost: of each choice at these prices.
            taken: extra seconds, link seconds, held bytes and left bytes of each choice. Left bytes
                are scaled like held bytes.
        """
        query = self.query
        without_fates_s = self.alpha * query.compute_s + (1 - self.alpha) * query.traffic_s
        bound_s = without_fates_s + self.cost_to_come[0] - self.mu * self.room
        # A choice counts less, the further it is from its layer's best. What is near depends on the
        # bound divided by the number of layers.
        most_s = float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0))
        least_s = max(1e-12 * most_s, 1e-300)
        near_s = max(FATE.near_best * bound_s / len(cost), least_s)
        near = np.exp((cost.min(1)[:, None] - cost) / near_s)
        shares = near / near.sum(1)[:, None]
        sums_to_come = [to_come((shares * x).sum(1)) for x in taken]
        room = self.room - self.last_bytes
        binding = (self.alpha > 0, self.alpha < 1, self.mu > 0)
        wholes = (bound_s - query.compute_s, bound_s - query.traffic_s, room)
        scales = []
        for x, whole, binds in zip(sums_to_come, wholes, binding, strict=False):
            is_scaled = binds and x[0] > 0
            scales.append(max(whole, 0.0) / x[0] if is_scaled else 1.0)
        scales.append(scales[-1])
        return [x * scale for x, scale in zip(sums_to_come, scales, strict=True)]

    def least_seconds(self, width: int, below_s: float = np.inf) -> StageChoices:
        """Finds the fastest choices that fit and take less than `below_s`.

        Among equally fast choices, those that swap least are taken, then those that hold least.
        """
        last = follow(
            self.growth,
            below_s * BELOW_FACTOR,
            width,
            self._bounds,
            partial(self._fittest, width),
        )
        states = last.states
        if not states.shape[1]:
            return StageChoices((), np.inf, np.inf, last.dropped)
        seconds = self._seconds(states)
        used = self.growth.least_bytes(states, self.growth.n)
        order = np.lexsort((used, states[SWAPPED], seconds))
        best = int(order[0])
        found_s = float(seconds[best])
        return StageChoices(
            self.growth.path(last.steps, best),
            found_s,
            float(used[best]),
            min(found_s, last.dropped),
        )

    def _bounds(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """Bounds from below the seconds that states lead to; infinite if they cannot fit."""
        query = self.query
        fits = self.growth.least_bytes(states, done) <= query.room_bytes
        fits &= states[SWAPPED] <= query.most_swapped_bytes
        # Three bounds hold: compute alone, the link alone, and both together with bytes at the
        # prices.
        compute_s = query.compute_s + states[EXTRA]
        link_s = query.traffic_s + 2 * self._swap_s(states)
        priced = self.alpha * compute_s + (1 - self.alpha) * link_s
        if self.mu:
            over = self._held_bytes(states) - query.room_bytes
            beyond = self.mu * beyond_held(states) + self.spare_to_come[done]
            to_come = np.maximum(self.cost_to_come[done], beyond)
            if self.growth.fixed_rows > MOST:
                largest = self.mu * states[MOST] + self.paid_to_come[done]
                to_come = np.maximum(to_come, largest)
            priced = priced + self.mu * np.where(fits, over, 0.0) + to_come
        else:
            priced = priced + self.cost_to_come[done]
        least_compute_s = compute_s + self.extra_to_come[done]
        bound_s = np.maximum.reduce([least_compute_s, link_s, priced])
        return np.where(fits, bound_s, np.inf)

    def _fittest(
        self,
        width: int,
        states: States,
        bound: np.ndarray,
        _alive: np.ndarray,
        done: int,
    ) -> np.ndarray:
        """Picks the states that stay: half by their bounds, half by expected seconds.

        Expected seconds add the estimates of `_expected`, and charge for bytes over the limit.
        """
        extra_s, link_s, to_hold, left = (expected[done] for expected in self.expected)
        held_bytes = self._held_bytes(states)
        beyond = np.maximum(beyond_held(states) - left, self.last_bytes)
        if self.growth.fixed_rows > MOST:
            beyond = np.maximum(beyond, states[MOST])
        over = held_bytes + to_hold + beyond - self.query.room_bytes
        compute_s = self.query.compute_s + states[EXTRA] + extra_s
        link_s = self.query.traffic_s + 2 * self._swap_s(states) + link_s
        may = np.isfinite(bound)
        overrun = np.maximum(np.where(may, over, 0.0), 0.0)
        dear_s = FATE.overrun_price * self.mu * overrun
        seconds = np.maximum(compute_s, link_s) + dear_s
        expected_s = np.where(may, seconds, np.inf)
        near = np.argpartition(expected_s, width)[:width]
        low = np.argpartition(bound, width)[:width]
        # The state that holds the least stays too, so that something is likelier to fit in the end.
        taken = np.where(may, held_bytes + beyond, np.inf)
        return np.concatenate([near, low, [taken.argmin()]])

    def _held_bytes(self, states: States) -> Float[np.ndarray, "M"]:
        """Returns the bytes that states hold at the moment that prices are put on."""
        return states[self.growth.fixed_rows + self.moment]

    def _seconds(self, states: States) -> Float[np.ndarray, "M"]:
        compute_s = self.query.compute_s + states[EXTRA]
        link_s = self.query.traffic_s + 2 * self._swap_s(states)
        return np.maximum(compute_s, link_s)

    def _swap_s(self, states: States) -> Float[np.ndarray, "M"]:
        swapped = states[SWAPPED]
        seconds = self.host.latency_s + swapped / self.host.bytes_per_s
        return np.where(swapped > 0, seconds, 0.0)
