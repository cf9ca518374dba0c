"""Fates for all layers of a device at once: the fastest under its limit, or the emptiest.

A device may run several stages, and halves of backwards, in any order. Its stages share the limit:
at each moment of the order, what all of them have in flight counts together (`Schedule.held`). The
search for fast fates is that of `stage_fates.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jvpipe.planners.joint.dominance import Cell, Lot
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.joint.stage_fates import FateQuery, FateSearch
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_bytes import StageBytes
from jvpipe.planners.model.stage_cost import joint_bytes, stage_bytes, stage_cost
from jvpipe.schedules.schedule import Holding

Fates = tuple[int, ...]
Moments = Sequence[Sequence[Holding]]
"""For each device, what its stages have in flight at each moment that matters."""


@dataclass(frozen=True, eq=False)
class DeviceFates:
    """Fates chosen so far for the devices of problems with one placement; a cache and its search.

    A placement is which stages lie on which devices. The problems may differ in their order.

    Attributes:
        pricing: the choices of all layers.
        swaps: whether some choices swap.
        known: fates found so far, by what they were asked for; None: no fates were found.
        kept: the bytes of stages that keep everything.
        prices: for each device the prices of its last search, which also bound similar ones well.
    """

    pricing: Pricing
    swaps: bool
    known: dict[object, Fates | None] = field(default_factory=dict)
    kept: dict[object, StageBytes[int]] = field(default_factory=dict)
    prices: dict[int, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, *, swaps: bool = False) -> "DeviceFates":
        """Prepares the choices of a problem's layers, with or without those that swap."""
        return DeviceFates(pricing_of(problem, swaps), swaps)

    def fastest(
        self, problem: Problem, bounds: Sequence[int], moments: Moments | None = None
    ) -> Decision | None:
        """Chooses the fastest fates that keep the limit; None if none were found.

        Args:
            problem: gives the order and the limit; it must have the placement of this object.
            bounds: of the stages.
            moments: what each device must have room for; None: what the order has in flight.
        """
        asked = moments or problem.schedule.held(problem.devices, problem.microbatches)
        return _decision(problem, bounds, lambda d, cells: self._fastest(problem, d, cells, asked))

    def emptiest(self, problem: Problem, bounds: Sequence[int]) -> Decision:
        """Chooses the fates that hold the fewest bytes on each device, whatever their seconds.

        Args:
            problem: gives the order; it must have the placement of this object.
            bounds: of the stages.
        """
        decision = _decision(problem, bounds, lambda d, cells: self._emptiest(problem, d, cells))
        assert decision is not None, "some fates take the fewest bytes"
        return decision

    def _fastest(
        self,
        problem: Problem,
        d: int,
        cells: Sequence[Cell],
        asked: Moments,
    ) -> Fates | None:
        """Chooses fates for the stages of one device; keeps everything if that fits."""
        moments = asked[d]
        keeping = [self._keeping(problem, cell) for cell in cells]
        limit = problem.limit_of(d)
        if limit is None or joint_bytes(keeping, moments) <= limit:
            return (0,) * sum(j - i for _, i, j in cells)
        # Static bytes are the same for all fates, so that they may be read from the stages that
        # keep everything.
        lot = self._lot(problem, cells, moments)
        room = float(limit - sum(stage.static for stage in keeping))
        if max(stage.reducing for stage in keeping) > room:
            return None  # replicas have no room to add up gradients, whatever is chosen
        if (lot, room) not in self.known:
            self.known[lot, room] = self._sought(problem, d, lot, room)
        return self.known[lot, room]

    def _keeping(self, problem: Problem, cell: Cell) -> StageBytes[int]:
        """Counts the bytes of a stage that keeps everything."""
        key = problem.in_flight, problem.splits, cell
        if key not in self.kept:
            self.kept[key] = stage_bytes(problem, *cell, [0] * len(problem.costs.layers))
        return self.kept[key]

    def _sought(
        self,
        problem: Problem,
        d: int,
        lot: Lot,
        room: float,
    ) -> Fates | None:
        """Searches for the fastest fates that fit `room` bytes, else for the emptiest."""
        keeping = [0] * len(problem.costs.layers)
        stages = [stage_cost(problem, *cell, keeping) for cell in lot.cells]
        # Without swaps, fates do not change the seconds of the link, so that these are left out.
        traffic_s = sum(stage.link_s for stage in stages) * self.swaps
        most_swapped = _most_swapped_bytes(problem)
        query = FateQuery(
            lot,
            sum(stage.compute_s for stage in stages),
            traffic_s,
            room,
            most_swapped,
        )
        search = FateSearch(self.pricing, query, prices=self.prices.get(d))
        self.prices[d] = search.prices
        fates = search.least_seconds(FATE.states).choices
        if fates:
            return fates
        # A search with few states may drop all that fit. Then the emptiest choices are tried.
        taken, fates = fewest_bytes(self.pricing, lot, exact=False)
        choices = self.pricing.at(lot.cells[0][0]).choices
        swapped = choices.swapped_bytes[search.growth.at, list(fates)].sum()
        fits = taken <= room and swapped <= most_swapped
        return fates if fits else None

    def _emptiest(
        self,
        problem: Problem,
        d: int,
        cells: Sequence[Cell],
    ) -> Fates:
        """Chooses the fates that hold the fewest bytes for the stages of one device."""
        moments = problem.schedule.held(problem.devices, problem.microbatches)[d]
        lot = self._lot(problem, cells, moments)
        if lot not in self.known:
            self.known[lot] = fewest_bytes(self.pricing, lot, exact=True)[1]
        fates = self.known[lot]
        assert fates is not None, "some fates take the fewest bytes"
        return fates

    def _lot(
        self,
        problem: Problem,
        cells: Sequence[Cell],
        moments: Sequence[Holding],
    ) -> Lot:
        """Describes the layers of a device; values that several layers read are always held."""
        freed = self.pricing.at(cells[0][0]).segments.given
        shared = [float(freed(i)[i:j].sum()) for _, i, j in cells]
        base_bytes = []
        for moment in moments:
            stages = zip(moment, shared, strict=True)
            base_bytes.append(sum(in_flight * size for (in_flight, _), size in stages))
        return Lot(
            tuple(cells),
            tuple(moments),
            tuple(base_bytes),
            problem.splits,
        )


def _most_swapped_bytes(problem: Problem) -> float:
    """Returns what each micro-batch may swap per stage, if the host's limit is shared evenly."""
    limit = problem.host_limit_bytes
    if limit is None:
        return float("inf")
    replicas = (problem.group(s).replicas for s in range(problem.stages))
    every = zip(replicas, problem.in_flight, strict=True)
    return limit / sum(r * k for r, k in every)


def _decision(
    problem: Problem, bounds: Sequence[int], choose: Callable[[int, Sequence[Cell]], Fates | None]
) -> Decision | None:
    """Makes a decision from the choices for each device's stages; None if a device has none."""
    places = problem.places
    chosen = [0] * bounds[-1]
    every = [(s, *span) for s, span in enumerate(pairwise(bounds))]
    for d in range(problem.devices):
        cells = [cell for cell in every if places[cell[0]] == d]
        fates = choose(d, cells)
        if fates is None:
            return None
        rest = iter(fates)
        for _, i, j in cells:
            chosen[i:j] = [next(rest) for _ in range(j - i)]
    return Decision(tuple(bounds), tuple(chosen))
