"""Finds the fastest choices (fates) for the layers of a device under its limit, by dominance.

A state stands for choices of the first layers: their seconds and bytes (`dominance.py`).
The search begins with one state, for no layers. With each further layer, a state becomes
several, one for each choice of the layer. Then three kinds of states are dropped:

    - states that cannot fit, whatever the remaining layers choose;
    - states whose lower bound of seconds (`dual_bounds.py`) is not below the best that is known;
    - states that another state dominates, because it is at least as good in every number.

Dropping them loses nothing. The first kind never fits. The second never gets faster than
the best choices that are known. The third never gets better than the state that dominates
it. So the result is the best, with one exception: if more than twice `width` states are
left after a layer, only the most promising stay. The answer's `bound_s` then tells how fast
the best may be.
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
    PerState,
    Places,
    States,
    beyond_held,
    follow,
)
from jvpipe.planners.joint.dual_bounds import DualBounds, Offers, Prices, Pricing, Relaxation
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.look_ahead import to_come, until_end
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.model.grids import link_seconds
from jvpipe.util.sizes import ROUNDING

BELOW_FACTOR = 1 - 1e-12
"""Only states whose bound is below the best known seconds times this factor are followed.

Without it, rounding could put the bound of an equally fast state just below these seconds.
"""


@dataclass(frozen=True)
class FateQuery:
    """The layers of a device, their seconds before fates add any, and the limits on fates.

    Attributes:
        lot: the layers, and the micro-batches in flight at each moment that matters.
        compute_s: the seconds of forwards and backwards.
        traffic_s: the seconds of traffic on the device's link to the host.
        room_bytes: the limit minus the bytes that are held with any choices.
        most_swapped_bytes: the limit on swapped bytes per micro-batch.
    """

    lot: Lot
    compute_s: float
    traffic_s: float
    room_bytes: float
    most_swapped_bytes: float = np.inf


@dataclass(frozen=True)
class StageChoices:
    """Choices for the layers of a device; empty, with infinite seconds, if none were found.

    No choices that fit take less than `bound_s`.
    """

    choices: tuple[int, ...]
    seconds: float
    bound_s: float

    @property
    def proven(self) -> bool:
        """Whether these choices are the fastest."""
        return self.bound_s >= self.seconds * (1 - 1e-9)


class FateSearch:
    """A search that answers a query; lower bounds come from prices (`dual_bounds.py` defines them).

    If no `prices` are given, the prices that prove the highest bound are used. Choices must
    fit at every moment of the lot. Prices apply only to the bytes of one moment: the one at
    which the device would hold the most if everything were kept.
    """

    def __init__(
        self,
        pricing: Pricing,
        query: FateQuery,
        prices: Prices | None = None,
    ) -> None:
        self.pricing = pricing
        self.query = query
        self.host = pricing.segments.problem.host
        self.growth = growth = Growth(pricing, query.lot)
        table = growth.table
        at = growth.at
        link_s = 2 * table.swapped_bytes[at] / self.host.bytes_per_s
        base = np.array(query.lot.base_bytes)
        keeping = base + growth.held[..., 0].sum(1)
        self.moment = int(keeping.argmax())
        held_bytes = growth.held[self.moment]
        self.room = query.room_bytes - base[self.moment]
        offers = Offers(table.allowed[at], growth.extra_s[at], link_s, held_bytes)
        # A device needs at least what all layers hold plus what the last layer works with.
        last = np.zeros_like(held_bytes)
        last[-1] = table.working_bytes[at[-1]]
        with_last = offers._replace(held_bytes=held_bytes + last)
        if prices is None:
            asked = Relaxation(with_last, self.room, query.compute_s, query.traffic_s)
            prices = DualBounds([asked]).solve()[0]
        self.prices = prices
        # Lower bounds of what the remaining layers cost at these prices.
        priced = offers.cost(*prices)
        paid = priced.min(1)
        # Backwards run from the last layer to the first. So while the backward of an
        # earlier layer runs, the remaining layers hold nothing of this micro-batch: their
        # backwards have freed it.
        left = table.left_bytes[at]
        others = offers._replace(held_bytes=held_bytes - left).cost(*prices)
        spared = others.min(1) - prices[1] * growth.given
        self.cost_to_come = to_come(with_last.cost(*prices).min(1))
        self.paid_to_come = to_come(paid)
        self.spare_to_come = until_end(spared, paid, growth.ends)
        self.extra_to_come = to_come(offers.cost(1.0, 0.0).min(1))  # of compute alone
        self.last_bytes = float(table.least_working_bytes[at[-1]])
        self.expected = self._expected(priced, offers.extra_s, link_s, held_bytes, left)

    def _expected(self, cost: PerChoice, *taken: PerChoice) -> Float[np.ndarray, "4 N1"]:
        """Estimates what the remaining layers take: means over choices, mostly the cheap ones.

        Compute, link and bytes each have a price. If a price is above 0, the best choices of all
        layers together use up what is available (complementary slackness). So the estimates for
        compute, link or bytes are then scaled until they add up to what is available.

        Args:
            cost: of each choice at these prices.
            taken: extra seconds, link seconds, held bytes and left bytes of each choice.
                Left bytes are scaled like held bytes.
        """
        query = self.query
        alpha, mu = self.prices
        without_fates_s = alpha * query.compute_s + (1 - alpha) * query.traffic_s
        bound_s = without_fates_s + self.cost_to_come[0] - mu * self.room
        # The more a choice costs above its layer's cheapest, the less it counts. The unit
        # of this difference is a share (`FATE.near_best`) of the mean seconds of a layer.
        most_s = float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0))
        near_s = max(FATE.near_best * bound_s / len(cost), 1e-12 * most_s, 1e-300)
        cheapest = cost.min(1, keepdims=True)
        near = np.exp((cheapest - cost) / near_s)
        shares = near / near.sum(1, keepdims=True)
        sums_to_come = np.array([to_come((shares * x).sum(1)) for x in taken])
        room = self.room - self.last_bytes
        binds = np.array([alpha > 0, alpha < 1, mu > 0])
        rest = np.maximum([bound_s - query.compute_s, bound_s - query.traffic_s, room], 0.0)
        whole = sums_to_come[:3, 0]
        # An estimate that is nearly 0 stays: its scale might be infinite.
        is_scaled = binds & (whole > ROUNDING * rest)
        scales = np.divide(rest, whole, out=np.ones(3), where=is_scaled)
        return sums_to_come * scales[[0, 1, 2, 2], None]

    def least_seconds(self, width: int, below_s: float = np.inf) -> StageChoices:
        """Finds the fastest choices that fit and take less than `below_s`.

        Ties go to the choices that swap least, then to those that hold least.

        Args:
            width: if more than twice `width` states are left after a layer, about twice
                `width` of them stay (`_fittest`).
            below_s: only choices that take fewer seconds than this are searched for.
        """
        growth = self.growth
        below_s *= BELOW_FACTOR
        fittest = partial(self._fittest, width)
        states, chosen, dropped = follow(growth, below_s, width, self._bounds, fittest)
        if not states.shape[1]:
            return StageChoices((), np.inf, min(below_s, dropped))
        seconds = np.maximum(*self._loads_s(states))
        used = growth.least_bytes(states, growth.n)
        best = np.lexsort((used, states[SWAPPED], seconds))[0]
        found_s = float(seconds[best])
        return StageChoices(tuple(chosen[best].tolist()), found_s, min(found_s, dropped))

    def emptiest(self) -> StageChoices:
        """Finds choices that hold few bytes; none if they break a limit on bytes.

        The search keeps few states (`FATE.few_states`), so other choices may hold fewer bytes. So
        if its choices break a limit, that proves nothing.
        """
        query = self.query
        growth = self.growth
        at = growth.at
        taken, choices, _ = fewest_bytes(self.pricing, query.lot, exact=False)
        swapped = float(growth.table.swapped_bytes[at, choices].sum())
        if taken > query.room_bytes or swapped > query.most_swapped_bytes:
            return StageChoices((), np.inf, 0.0)
        compute_s = query.compute_s + float(growth.extra_s[at, choices].sum())
        link_s = query.traffic_s + 2 * self.host.seconds(swapped)
        return StageChoices(choices, max(compute_s, link_s), 0.0)

    def _bounds(self, states: States, done: int) -> PerState:
        """Returns lower bounds of the seconds that states lead to; infinite if they cannot fit."""
        query = self.query
        alpha, mu = self.prices
        fits = self.growth.least_bytes(states, done) <= query.room_bytes
        fits &= states[SWAPPED] <= query.most_swapped_bytes
        # There are three bounds: compute alone, the link alone, and the weighted mean of
        # both with the price of bytes.
        compute_s, link_s = self._loads_s(states)
        priced = alpha * compute_s + (1 - alpha) * link_s
        to_come = self.cost_to_come[done]
        if mu:
            beyond = mu * beyond_held(states) + self.spare_to_come[done]
            to_come = np.maximum(to_come, beyond)
            if self.growth.fixed_rows > MOST:
                largest = mu * states[MOST] + self.paid_to_come[done]
                to_come = np.maximum(to_come, largest)
            over = self._held_bytes(states) - query.room_bytes
            priced = priced + mu * np.where(fits, over, 0.0)
        least_compute_s = compute_s + self.extra_to_come[done]
        bound_s = np.maximum.reduce([least_compute_s, link_s, priced + to_come])
        return np.where(fits, bound_s, np.inf)

    def _fittest(
        self,
        width: int,
        states: States,
        bound: PerState,
        _alive: Places,
        done: int,
    ) -> Places:
        """Picks the states that stay: `width` with the least bounds, and `width` likely to be fast.

        The expected seconds are those of a state, plus the estimates of `_expected` for the
        remaining layers, plus a price for each byte that would then be over the limit.
        """
        extra_s, link_s, to_hold, left = self.expected[:, done]
        held_bytes = self._held_bytes(states)
        beyond = np.maximum(beyond_held(states) - left, self.last_bytes)
        if self.growth.fixed_rows > MOST:
            beyond = np.maximum(beyond, states[MOST])
        over = held_bytes + to_hold + beyond - self.query.room_bytes
        compute_so_far_s, link_so_far_s = self._loads_s(states)
        may = np.isfinite(bound)
        overrun = np.maximum(np.where(may, over, 0.0), 0.0)
        penalty_s = FATE.overrun_price * self.prices[1] * overrun
        seconds = np.maximum(compute_so_far_s + extra_s, link_so_far_s + link_s)
        expected_s = np.where(may, seconds + penalty_s, np.inf)
        near = np.argpartition(expected_s, width)[:width]
        # If neither bytes nor the link have a price, the bounds of many states are equal.
        taken = np.where(may, held_bytes + beyond, np.inf)
        low = np.lexsort((taken, bound))[:width]
        # The state that takes the fewest bytes stays too: it is the likeliest to fit in the end.
        return np.concatenate([near, low, [taken.argmin()]])

    def _held_bytes(self, states: States) -> PerState:
        """Returns the bytes that states hold at the moment to which prices apply."""
        return states[self.growth.fixed_rows + self.moment]

    def _loads_s(self, states: States) -> tuple[PerState, PerState]:
        """Counts the seconds of compute and of the link that states take."""
        query = self.query
        one_way_s = link_seconds(self.host, states[SWAPPED])
        return query.compute_s + states[EXTRA], query.traffic_s + 2 * one_way_s
