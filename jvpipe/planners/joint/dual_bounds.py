"""Bounds the seconds of many segments from below at once, whatever fates their layers have.

The method is Lagrangian relaxation: the limit on bytes is replaced by a price for bytes. A segment
is a range of layers, as a possible stage. Legend, in seconds per micro-batch:

    compute   forwards and backwards of the segment's layers
    extra     what the layers' choices of fates add to compute
    swaps     what the choices copy over the link to the host, out and in
    traffic   all else on that link
    alpha     the weight of compute, from 0 to 1; the link has the weight 1 - alpha
    mu        the price of a byte in seconds, at least 0

A segment takes max(compute + extra, traffic + swaps) seconds. If its bytes keep the limit, then

    seconds >= alpha (compute + extra) + (1 - alpha) (traffic + swaps) + mu (bytes - limit)

for any prices alpha and mu. The reason is that a maximum is at least any weighted mean, and that
bytes - limit is at most 0.

The bytes are at least what all layers hold, plus what the last layer works with. So the right side
is a sum over layers, and is least if each layer makes its cheapest choice at these prices. The
bound of any segment is then a difference of two prefix sums.

Bad prices give a weak bound, but never a wrong one. `DualBounds` finds good prices for some
segments. They also bound the neighbors of these segments well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jvpipe.planners.joint.choice_arrays import Choices, PerChoice
from jvpipe.planners.model.segments import CutBlock, Grid, Segments, between, most_of, sums


class Relaxation(NamedTuple):
    """What the bound of one segment depends on besides prices.

    Attributes:
        extra_s: extra seconds of compute, for each choice of each layer; infinite for choices that
            are not possible.
        link_s: seconds of swaps, for each choice of each layer.
        held: bytes held, for each choice of each layer; for the last layer also its working bytes.
        room_bytes: what the held bytes may add up to.
        compute_s: seconds of compute without extra ones.
        traffic_s: seconds of the link without swaps.
    """

    extra_s: PerChoice
    link_s: PerChoice
    held: PerChoice
    room_bytes: float
    compute_s: float
    traffic_s: float


@dataclass(frozen=True, eq=False)
class Pricing:
    """All choices of all layers under a limit, and the bounds that prices prove for segments.

    If a stage has several devices, each works on a share of a micro-batch, so that choices cost
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
    swaps: bool = True

    @staticmethod
    def of(
        segments: Segments,
        limit_bytes: float,
        swaps: bool = True,
    ) -> "Pricing":
        """Collects the choices of the layers of segments.

        Args:
            segments: of the layers.
            limit_bytes: what a device may hold.
            swaps: whether choices that swap are included.
        """
        return Pricing(segments, Choices.of(segments.costs, swaps), limit_bytes, swaps)

    def at(self, s: int) -> "Pricing":
        """Returns the pricing for the shares of micro-batches that a stage's devices work on."""
        segments = self.segments.of(s)
        if segments is self.segments:
            return self
        if id(segments) not in self._at:
            self._at[id(segments)] = Pricing.of(segments, self.limit_bytes, self.swaps)
        return self._at[id(segments)]

    @cached_property
    def _at(self) -> dict[int, "Pricing"]:
        return {}

    def extra_s(self, s: int) -> PerChoice:
        """Returns the extra seconds of all choices on a device of a stage."""
        slowness = self.segments.problem.slowness(s)
        if slowness not in self._extra_s:
            self._extra_s[slowness] = self.choices.extra_s(slowness)
        return self._extra_s[slowness]

    @cached_property
    def _extra_s(self) -> dict[tuple[float, ...], PerChoice]:
        return {(): self.choices.extra_s()}

    def table(self, s: int, layers: slice) -> tuple[PerChoice, PerChoice, PerChoice]:
        """Returns extra seconds, link seconds and held bytes of layers' choices on a stage.

        A choice gets infinite extra seconds if a layer does not have it, or if its working bytes
        alone are over the limit.

        Args:
            s: the stage.
            layers: a range of the model's layers.
        """
        choices = self.choices
        flight = (self.segments.in_flight[s], 0)
        working = choices.working_bytes[layers]
        there = choices.allowed[layers] & (working <= self.limit_bytes)
        extra_s = np.where(there, self.extra_s(s)[layers], np.inf)
        # Swapped bytes cross the link twice: out and in.
        twice = 2 * choices.swapped_bytes[layers]
        link_s = twice / self.segments.problem.host.bytes_per_s
        return extra_s, link_s, choices.held_bytes(flight, layers)

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
            compute_s: seconds of the layers without extra ones.
            traffic_s: seconds of the link without swaps.
        """
        s, i, j = cell
        extra_s, link_s, held_bytes = self.table(s, slice(i, j))
        held_bytes[-1] += self.choices.working_bytes[j - 1]
        return Relaxation(
            extra_s,
            link_s,
            held_bytes,
            room_bytes,
            compute_s,
            traffic_s,
        )

    def least_bytes(self, block: CutBlock) -> Grid:
        """Bounds from below the peak bytes of each segment of a block, whatever is chosen."""
        layers = slice(block.starts[0], block.ends[-1])
        extra_s, _, held_bytes = self.table(block.s, layers)
        held_bytes = np.where(np.isfinite(extra_s), held_bytes, np.inf)
        taken = self._over(held_bytes, self.choices.working_bytes[layers], block)
        working = most_of(self.choices.least_working_bytes, block.starts, block.ends)
        return block.fixed_bytes + np.maximum(taken, working)

    def bound_s(self, block: CutBlock, alpha: float, mu: float) -> Grid:
        """Bounds from below the seconds of each segment of a block, by the module's inequality.

        Args:
            block: the segments.
            alpha: the weight of compute.
            mu: the price of a byte, in seconds.
        """
        layers = slice(block.starts[0], block.ends[-1])
        extra_s, link_s, held_bytes = self.table(block.s, layers)
        there = np.isfinite(extra_s)
        # alpha may be 0, and 0 times infinity is not a number: only finite seconds are weighted.
        finite_s = np.where(there, extra_s, 0.0)
        priced = alpha * finite_s + (1 - alpha) * link_s + mu * held_bytes
        cost = np.where(there, priced, np.inf)
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

        A layer without a possible choice adds nothing, which keeps the prefix sums finite. Segments
        with such a layer are excluded elsewhere: `least_bytes` counts the layer's working bytes,
        which are over the limit.

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
        total = sums(per_layer)
        more = np.concatenate([[0.0], final - per_layer])
        ends = np.maximum(block.ends - first, 0)
        return between(total, block.starts - first, ends) + more[ends]


class _Point(NamedTuple):
    """The dual function of each relaxation at one mu and one alpha: the bound that they prove.

    Attributes:
        mu: the price of a byte.
        dual: the bound in seconds.
        over: the dual's slope in mu: by how much the held bytes of the cheapest choices exceed the
            room.
        compute_over_link: the dual's slope in alpha: by how much compute, with these choices, takes
            longer than the link.
    """

    mu: np.ndarray
    dual: np.ndarray
    over: np.ndarray
    compute_over_link: np.ndarray


class DualBounds:
    """A search for the best prices of several relaxations, side by side.

    The layers of all relaxations (`asked`) stand in one table, one relaxation after the other. The
    numbers of steps, and the range of prices around `scale`, may be changed: they trade time for
    better bounds.
    """

    ALPHA_STEPS, BISECTION_STEPS, SECANT_STEPS, PRICE_RANGE = 10, 7, 5, 1e4

    def __init__(self, asked: Sequence[Relaxation]) -> None:
        sizes = [len(question.extra_s) for question in asked]
        extra_s = np.concatenate([question.extra_s for question in asked])
        self.there = np.isfinite(extra_s)
        self.extra_s = np.where(self.there, extra_s, 0.0)
        self.link_s = np.concatenate([question.link_s for question in asked])
        self.held = np.concatenate([question.held for question in asked])
        self.room = np.array([question.room_bytes for question in asked])
        self.compute_s = np.array([question.compute_s for question in asked])
        self.traffic_s = np.array([question.traffic_s for question in asked])
        # `of` is the relaxation of each layer; `first` is the first layer of each relaxation.
        self.of = np.repeat(np.arange(len(asked)), sizes)
        self.first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        # A price of `scale` makes bytes cost about as much as seconds.
        held_bytes = np.where(self.there, self.held, 0)
        largest = np.add.reduceat(held_bytes.max(1), self.first)
        seconds = self.compute_s + self.traffic_s + 1e-30
        self.scale = seconds / np.maximum(largest, 1.0)
        self.best = np.full(len(asked), -np.inf)
        self.prices = np.zeros((len(asked), 2))

    def solve(self) -> list[tuple[float, float]]:
        """Returns for each relaxation prices (alpha, mu) whose bound is the best, or nearly so."""
        alpha = np.ones(len(self.room))
        compute_over_link = self._bisect_mu(alpha)
        # If compute takes longer than the link at alpha = 1, then alpha = 1 is best. Otherwise the
        # best alpha is below 1, where compute and link take equally long, and is found by halving.
        is_sought = compute_over_link < 0
        if is_sought.any():
            low = np.zeros_like(alpha)
            high = np.ones_like(alpha)
            for _ in range(self.ALPHA_STEPS):
                alpha = np.where(is_sought, (low + high) / 2, 1.0)
                sign = self._bisect_mu(alpha)
                low = np.where(sign > 0, alpha, low)
                high = np.where(sign > 0, high, alpha)
        return [(float(a), float(m)) for a, m in self.prices]

    def _bisect_mu(self, alpha: np.ndarray) -> np.ndarray:
        """Finds nearly the best mu of each relaxation for its alpha, and records the best prices.

        Returns:
            By how many seconds compute exceeds the link at that mu.
        """
        _, free_over, free_compute_over_link = self._evaluate(alpha, np.zeros_like(alpha))
        low = self._point(alpha, self.scale / self.PRICE_RANGE)
        high = self._point(alpha, self.scale * self.PRICE_RANGE)
        for step in range(self.BISECTION_STEPS + self.SECANT_STEPS):
            # The dual is concave in mu, so the sign of its slope (`over`) says on which side the
            # best mu lies. The geometric mean is tried, because prices range over many powers of
            # ten.
            mu = np.sqrt(low.mu * high.mu)
            if step >= self.BISECTION_STEPS:
                # A dual is made of straight pieces. Once `low` and `high` are on neighboring
                # pieces, the best mu is where the tangents at `low` and `high` meet.
                slope = np.maximum(low.over - high.over, 1e-300)
                at_zero = high.dual - high.over * high.mu  # of the line through `high`
                rise = at_zero - low.dual + low.over * low.mu
                mu = np.clip(rise / slope, low.mu, high.mu)
            point = self._point(alpha, mu)
            over = point.over > 0
            low = _either(over, point, low)
            high = _either(over, high, point)
        # If the cheapest choices fit even when bytes are free (mu = 0), then mu = 0 is best.
        return np.where(
            free_over > 0,
            high.compute_over_link,
            free_compute_over_link,
        )

    def _point(self, alpha: np.ndarray, mu: np.ndarray) -> "_Point":
        return _Point(mu, *self._evaluate(alpha, mu))

    def _evaluate(
        self, alpha: np.ndarray, mu: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Computes the dual at these prices and its two slopes (see `_Point`).

        Any prices give a valid bound. The best bound seen so far, and its prices, are recorded.
        """
        a = alpha[self.of][:, None]
        m = mu[self.of][:, None]
        priced = a * self.extra_s + (1 - a) * self.link_s + m * self.held
        cost = np.where(self.there, priced, np.inf)
        # Each layer makes its cheapest choice; sums are over the layers of each relaxation.
        chosen = np.arange(len(cost)), cost.argmin(1)
        held_bytes = np.add.reduceat(self.held[chosen], self.first)
        extra_s = np.add.reduceat(self.extra_s[chosen], self.first)
        swaps_s = np.add.reduceat(self.link_s[chosen], self.first)
        compute_s = self.compute_s + extra_s
        link_s = self.traffic_s + swaps_s
        over = held_bytes - self.room
        dual = alpha * compute_s + (1 - alpha) * link_s + mu * over
        better = dual > self.best
        self.best = np.where(better, dual, self.best)
        self.prices[better] = np.stack([alpha, mu], 1)[better]
        return dual, over, compute_s - link_s


def _either(first: np.ndarray, a: _Point, b: _Point) -> _Point:
    """Takes the numbers of each relaxation from `a` if `first` holds for it, else from `b`."""
    return _Point(*(np.where(first, x, y) for x, y in zip(a, b, strict=True)))
