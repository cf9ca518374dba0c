"""Bounds the seconds of many segments from below at once, whatever fates their layers have.

The method is Lagrangian relaxation: the limit on bytes is replaced by a price for bytes. A
segment is a range of layers, as a possible stage. Legend, in seconds per micro-batch:

    compute   forwards and backwards of the segment's layers
    extra     what the layers' choices of fates add to compute
    swaps     what the choices copy over the link to the host, out and in
    traffic   all other transfers on that link
    alpha     the weight of compute, from 0 to 1; the link has the weight 1 - alpha
    mu        the price of a byte in seconds, at least 0

A segment takes max(compute + extra, traffic + swaps) seconds. If its bytes keep the limit, then

    seconds >= alpha (compute + extra) + (1 - alpha) (traffic + swaps) + mu (bytes - limit)

for any prices alpha and mu. The reason is that a maximum is at least any weighted mean, and
that bytes - limit is at most 0.

The bytes are at least what all layers hold, plus what the last layer works with. So the
right side is a sum over layers, and is least if each layer makes its cheapest choice at
these prices. The bound of any segment is then a difference of two prefix sums.

Bad prices give a weak bound, but never a wrong one. `DualBounds` finds good prices for some
segments. The same prices also give good bounds for segments with nearby ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jvpipe.planners.joint.choice_arrays import Choices, PerChoice
from jvpipe.planners.model.grids import between, most_of, sums
from jvpipe.planners.model.segments import CutBlock, Segments
from jvpipe.planners.model.spans import Grid

Prices = tuple[float, float]
"""The module's (alpha, mu): the weight of compute, and the seconds that a byte costs."""
Points = Float[np.ndarray, "4 relaxations"]
"""The bound that one alpha and one mu prove for each relaxation (its dual), and its slopes.

The rows are mu, the dual in seconds, its slope in mu (OVER: by how much the held bytes of the
cheapest choices exceed the room), and its slope in alpha (COMPUTE_OVER_LINK: by how much compute,
with these choices, takes longer than the link).
"""
OVER, COMPUTE_OVER_LINK = 2, 3


class Offers(NamedTuple):
    """What each choice of each layer takes on one device.

    Attributes:
        there: whether the choice is possible.
        extra_s: extra seconds of compute; finite even for choices that are not possible.
        link_s: seconds of swaps.
        held_bytes: bytes held.
    """

    there: Bool[np.ndarray, "N C"]
    extra_s: PerChoice
    link_s: PerChoice
    held_bytes: PerChoice

    def cost(self, alpha: float | np.ndarray, mu: float | np.ndarray) -> PerChoice:
        """Returns what each choice costs at these prices; infinity if it is not possible."""
        seconds = alpha * self.extra_s + (1 - alpha) * self.link_s
        return np.where(
            self.there,
            seconds + mu * self.held_bytes,
            np.inf,
        )


class Relaxation(NamedTuple):
    """What the bound of one segment depends on besides prices.

    Attributes:
        offers: what the choices of the segment's layers take. The last layer's bytes
            include its working bytes.
        room_bytes: the most that the held bytes may add up to.
        compute_s: seconds of compute without the choices' extra seconds.
        traffic_s: seconds of the link without swaps.
    """

    offers: Offers
    room_bytes: float
    compute_s: float
    traffic_s: float


@dataclass(frozen=True, eq=False)
class Pricing:
    """All choices of all layers under a limit, and the bounds that prices prove for segments.

    If a stage has several devices, each works on a share of a micro-batch, so choices cost
    less there: `at` returns the pricing of such a stage.

    Attributes:
        segments: of the model.
        choices: of the layers.
        limit_bytes: what a device may hold.
        swaps: whether choices that swap are included.
    """

    segments: Segments
    choices: Choices
    limit_bytes: float
    swaps: bool

    def at(self, s: int) -> "Pricing":
        """Returns the pricing for the shares of micro-batches that a stage's devices work on."""
        segments = self.segments.of(s)
        if segments not in self._at:
            choices = Choices.of(segments.costs, self.swaps)
            self._at[segments] = replace(self, segments=segments, choices=choices)
        return self._at[segments]

    @cached_property
    def _at(self) -> dict[Segments, "Pricing"]:
        return {self.segments: self}

    def extra_s(self, s: int) -> PerChoice:
        """Returns the extra seconds of all choices on a device of a stage."""
        return self.choices.extra_s(self.segments.problem.slowness(s))

    def offers(self, s: int, layers: slice) -> Offers:
        """Returns what the choices of some layers take on a device of a stage.

        A choice is not possible if the layer does not have it, or if its working bytes
        alone are over the limit.

        Args:
            s: the stage.
            layers: a range of the model's layers.
        """
        choices = self.choices
        segments = self.segments
        there = choices.allowed[layers] & (choices.working_bytes[layers] <= self.limit_bytes)
        # Swapped bytes cross the link twice: out and in.
        twice = 2 * choices.swapped_bytes[layers]
        return Offers(
            there,
            np.where(there, self.extra_s(s)[layers], 0.0),
            twice / segments.problem.host.bytes_per_s,
            choices.held_bytes((segments.in_flight[s], 0), layers),
        )

    def relaxed(
        self,
        cell: tuple[int, int, int],
        room_bytes: float,
        compute_s: float,
        traffic_s: float,
    ) -> Relaxation:
        """Makes the relaxation of layers [i, j) on stage s, so that prices can be found for it.

        Args:
            cell: s, i and j.
            room_bytes: what the limit leaves for the bytes that layers hold and work with.
            compute_s: seconds of the layers without the choices' extra seconds.
            traffic_s: seconds of the link without swaps.
        """
        s, i, j = cell
        offers = self.offers(s, slice(i, j))
        offers.held_bytes[-1] += self.choices.working_bytes[j - 1]
        return Relaxation(
            offers,
            room_bytes,
            compute_s,
            traffic_s,
        )

    def least_bytes(self, block: CutBlock) -> Grid:
        """Bounds from below the peak bytes of each segment of a block, whatever is chosen."""
        choices = self.choices
        layers = slice(block.starts[0], block.ends[-1])
        offers = self.offers(block.s, layers)
        held_bytes = np.where(offers.there, offers.held_bytes, np.inf)
        taken = self._over(held_bytes, choices.working_bytes[layers], block)
        working = most_of(choices.least_working_bytes, block.starts, block.ends)
        return block.fixed_bytes + np.maximum(taken, working)

    def bound_s(self, block: CutBlock, prices: Prices) -> Grid:
        """Bounds from below the seconds of each segment of a block, by the module's inequality."""
        alpha, mu = prices
        layers = slice(block.starts[0], block.ends[-1])
        cost = self.offers(block.s, layers).cost(alpha, mu)
        last = mu * self.choices.working_bytes[layers]
        paid = self._over(cost, last, block)
        free = mu * (self.limit_bytes - block.fixed_bytes)
        fixed_s = alpha * block.compute_s + (1 - alpha) * block.traffic_s
        return fixed_s + paid - free

    def _over(
        self,
        cost: PerChoice,
        last: PerChoice,
        block: CutBlock,
    ) -> Grid:
        """Sums the least cost of each layer over each segment of a block.

        A layer without a possible choice adds nothing, which keeps the prefix sums finite.
        Segments with such a layer are excluded elsewhere: `least_bytes` counts the layer's
        working bytes, which are over the limit.

        Args:
            cost: of each choice of each layer.
            last: what is added to the costs of a segment's last layer.
            block: the segments.
        """
        first = block.starts[0]
        least = cost.min(1)
        there = np.isfinite(least)
        per_layer = np.where(there, least, 0.0)
        final = np.where(there, (cost + last).min(1), 0.0)
        more = np.append(0.0, final - per_layer)
        ends = np.maximum(block.ends - first, 0)
        return between(sums(per_layer), block.starts - first, ends) + more[ends]


class DualBounds:
    """A search for the best prices of several relaxations, side by side.

    The layers of all relaxations (`asked`) are in one table, one relaxation after the other.
    The numbers of steps, and the range of prices around `scale`, may be changed: they trade
    time for better bounds.
    """

    ALPHA_STEPS = 10
    BISECTION_STEPS = 7
    SECANT_STEPS = 5
    PRICE_RANGE = 1e4

    def __init__(self, asked: Sequence[Relaxation]) -> None:
        every, *rest = zip(*asked, strict=True)
        self.offers = Offers(*map(np.concatenate, zip(*every, strict=True)))
        self.room, self.compute_s, self.traffic_s = map(np.array, rest)
        sizes = [len(offers.there) for offers in every]
        # `of` is the relaxation of each layer; `first` is the first layer of each relaxation.
        self.of = np.repeat(np.arange(len(asked)), sizes)
        self.first = np.cumsum([0, *sizes[:-1]])
        # At a price of `scale`, the bytes of a relaxation cost about as much as its seconds.
        held_bytes = np.where(self.offers.there, self.offers.held_bytes, 0)
        largest = np.add.reduceat(held_bytes.max(1), self.first)
        seconds = self.compute_s + self.traffic_s + 1e-30
        self.scale = seconds / np.maximum(largest, 1.0)
        self.best = np.full(len(asked), -np.inf)
        self.prices = np.zeros((len(asked), 2))

    def solve(self) -> list[Prices]:
        """Returns for each relaxation prices (alpha, mu) whose bound is the best, or nearly so."""
        alpha = np.ones(len(self.room))
        compute_over_link = self._bisect_mu(alpha)
        # If compute takes longer than the link at alpha = 1, then alpha = 1 is best.
        # Otherwise the best alpha is smaller: the one at which compute and link take
        # equally long. Halving finds it.
        is_sought = compute_over_link < 0
        if is_sought.any():
            low, high = np.zeros_like(alpha), alpha
            for _ in range(self.ALPHA_STEPS):
                alpha = np.where(is_sought, (low + high) / 2, 1.0)
                sign = self._bisect_mu(alpha)
                low = np.where(sign > 0, alpha, low)
                high = np.where(sign > 0, high, alpha)
        return [(alpha, mu) for alpha, mu in self.prices.tolist()]

    def _bisect_mu(self, alpha: np.ndarray) -> np.ndarray:
        """Finds nearly the best mu of each relaxation for its alpha, and records the best prices.

        Returns:
            By how many seconds compute exceeds the link at that mu.
        """
        free = self._point(alpha, np.zeros_like(alpha))
        low = self._point(alpha, self.scale / self.PRICE_RANGE)
        high = self._point(alpha, self.scale * self.PRICE_RANGE)
        for step in range(self.BISECTION_STEPS + self.SECANT_STEPS):
            # The dual is concave in mu, so the sign of its slope (`over`) says on which
            # side the best mu lies. The geometric mean is tried, because prices range over
            # many powers of ten.
            low_mu, low_dual, low_over, _ = low
            high_mu, high_dual, high_over, _ = high
            mu = np.sqrt(low_mu * high_mu)
            if step >= self.BISECTION_STEPS:
                # A dual is made of straight pieces. Once `low` and `high` are on neighboring
                # pieces, the best mu is where the tangents at `low` and `high` meet.
                slope = np.maximum(low_over - high_over, 1e-300)
                at_zero = high_dual - high_over * high_mu  # of the line through `high`
                rise = at_zero - low_dual + low_over * low_mu
                mu = np.clip(rise / slope, low_mu, high_mu)
            point = self._point(alpha, mu)
            over = point[OVER] > 0
            low = np.where(over, point, low)
            high = np.where(over, high, point)
        # If the cheapest choices fit even when bytes are free (mu = 0), then mu = 0 is best.
        best = np.where(free[OVER] > 0, high, free)
        return best[COMPUTE_OVER_LINK]

    def _point(self, alpha: np.ndarray, mu: np.ndarray) -> Points:
        """Computes the dual of each relaxation at these prices, and its slopes.

        Any prices give a valid bound. The best bound seen so far, and its prices, are recorded.
        """
        offers = self.offers
        cost = offers.cost(alpha[self.of, None], mu[self.of, None])
        # Each layer makes its cheapest choice; sums are over the layers of each relaxation.
        chosen = np.arange(len(cost)), cost.argmin(1)
        _, *numbers = offers
        extra_s, swaps_s, held_bytes = (np.add.reduceat(x[chosen], self.first) for x in numbers)
        compute_s = self.compute_s + extra_s
        link_s = self.traffic_s + swaps_s
        over = held_bytes - self.room
        dual = alpha * compute_s + (1 - alpha) * link_s + mu * over
        better = dual > self.best
        self.best = np.where(better, dual, self.best)
        self.prices[better] = np.stack([alpha, mu], 1)[better]
        return np.stack([mu, dual, over, compute_s - link_s])
