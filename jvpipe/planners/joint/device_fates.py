"""Chooses the fates of all layers of a device together: the fastest that fit, or the emptiest.

The emptiest fates are those with which the device holds the fewest bytes at its fullest moment.
Devices are searched one by one, because each has a memory limit of its own. A device may run
several stages, and backwards in halves, in any order. Its stages share its memory limit: at each
moment of the order, the bytes that all of its stages have in flight are added up. Fates must fit at
every moment that matters (`Schedule.held` lists these moments).

The searches are those of `stage_fates.py` (fastest) and `min_bytes.py` (emptiest). This file runs
them for a whole device, and caches the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from jvpipe.planners.joint.dual_bounds import Prices, Pricing
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.lot import Cell, Lot, cells
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.joint.stage_fates import FateQuery, FateSearch
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_bytes import StageBytes, joint_bytes, stage_bytes
from jvpipe.planners.model.stage_cost import stage_cost
from jvpipe.schedules.schedule import Holding

Fates = tuple[int, ...]
Moments = Sequence[Sequence[Holding]]
"""For each device, what its stages have in flight at each moment that matters (`Schedule.held`)."""


@dataclass(frozen=True, eq=False)
class DeviceFates:
    """A chooser of fates with a cache, for problems with the same placement.

    A placement assigns stages to devices. The problems may differ in their order of tasks.

    Attributes:
        pricing: the choices of all layers.
        known: a cache of fates by query; None: no fates were found.
        kept: a cache of the bytes of stages that keep everything.
        prices: for each device, the prices of its first search. Later searches are similar, so the
            same prices bound them well.
    """

    pricing: Pricing
    known: dict[object, Fates | None] = field(default_factory=dict)
    kept: dict[object, StageBytes] = field(default_factory=dict)
    prices: dict[int, Prices] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, *, swaps: bool = False) -> "DeviceFates":
        """Makes a chooser for a problem's layers, with or without choices that swap."""
        return DeviceFates(pricing_of(problem, swaps))

    def fastest(
        self,
        problem: Problem,
        bounds: Sequence[int],
        moments: Moments | None = None,
    ) -> Decision | None:
        """Chooses the fastest fates that keep the limit; None if none were found.

        Args:
            problem: gives the order of tasks and the limits; it must have this object's placement.
            bounds: of the stages.
            moments: the micro-batches in flight that each device must have room for; None: those
                of the problem's order.
        """
        return _decision(problem, bounds, self._fastest, moments)

    def emptiest(self, problem: Problem, bounds: Sequence[int]) -> Decision:
        """Chooses the fates that hold the fewest bytes on each device, whatever their seconds.

        Args:
            problem: gives the order of tasks; it must have this object's placement.
            bounds: of the stages.
        """
        decision = _decision(problem, bounds, self._emptiest)
        assert decision is not None, "some fates take the fewest bytes"
        return decision

    def _fastest(
        self,
        problem: Problem,
        d: int,
        cells: Sequence[Cell],
        moments: Sequence[Holding],
    ) -> Fates | None:
        """Chooses fates for the stages of one device; keeps everything if that fits.

        Args:
            problem: gives the order of tasks and the limits.
            d: the device.
            cells: its stages.
            moments: what the stages have in flight at each moment at which fates must fit.
        """
        keeping = [self._keeping(problem, cell) for cell in cells]
        limit = problem.limit_of(d)
        if limit is None or joint_bytes(keeping, moments) <= limit:
            return (0,) * sum(j - i for _, i, j in cells)
        # Static bytes (parameters, gradients and optimizer state) do not depend on fates, so those
        # of stages that keep everything are used.
        lot = self._lot(problem, cells, moments)
        room = float(limit - sum(stage.static for stage in keeping))
        if max(stage.reducing for stage in keeping) > room:
            return None  # with any fates, replicas lack the room to add up gradients
        # Orders with more micro-batches in flight leave each of them less room on the host.
        asked = lot, room, _most_swapped_bytes(problem)
        if asked not in self.known:
            self.known[asked] = self._sought(problem, d, *asked)
        return self.known[asked]

    def _keeping(self, problem: Problem, cell: Cell) -> StageBytes:
        """Counts the bytes of a stage that keeps everything."""
        key = problem.in_flight, problem.splits, cell
        if key not in self.kept:
            self.kept[key] = stage_bytes(problem, *cell, [0] * cell[2])
        return self.kept[key]

    def _sought(
        self,
        problem: Problem,
        d: int,
        lot: Lot,
        room: float,
        most_swapped_bytes: float,
    ) -> Fates | None:
        """Searches for the fastest fates that fit; None if none were found.

        Args:
            problem: gives the costs.
            d: the device, whose prices of an earlier search are used again.
            lot: the layers of the device.
            room: the bytes that its layers may hold.
            most_swapped_bytes: how many bytes they may swap per micro-batch in flight.
        """
        stages = [stage_cost(problem, s, i, j, [0] * j) for s, i, j in lot.cells]
        # If no choice swaps, the seconds of the link are the same for all fates, and are left out.
        traffic_s = sum(stage.link_s for stage in stages) * self.pricing.swaps
        query = FateQuery(
            lot,
            sum(stage.compute_s for stage in stages),
            traffic_s,
            room,
            most_swapped_bytes,
        )
        search = FateSearch(self.pricing, query, self.prices.get(d))
        self.prices[d] = search.prices
        # A search that keeps few states (`dominance.py`) may have dropped all states whose fates
        # fit. Then the emptiest fates are tried, which are the likeliest to fit.
        fastest = search.least_seconds(FATE.states)
        return fastest.choices or search.emptiest().choices or None

    def _emptiest(
        self,
        problem: Problem,
        _d: int,
        cells: Sequence[Cell],
        moments: Sequence[Holding],
    ) -> Fates | None:
        """Chooses the fates that hold the fewest bytes for the stages of one device."""
        lot = self._lot(problem, cells, moments)
        if lot not in self.known:
            self.known[lot] = fewest_bytes(self.pricing, lot, exact=True).choices
        return self.known[lot]

    def _lot(
        self,
        problem: Problem,
        cells: Sequence[Cell],
        moments: Sequence[Holding],
    ) -> Lot:
        """Describes the layers of a device to the searches.

        Values that several layers read are held with any fates, once for each micro-batch in
        flight.
        """
        freed = self.pricing.at(cells[0][0]).segments.given
        shared = [float(freed(i)[i:j].sum()) for _, i, j in cells]
        base_bytes = []
        for moment in moments:
            stages = zip(moment, shared, strict=True)
            base_bytes.append(sum(in_flight * size for (in_flight, _), size in stages))
        return Lot(tuple(cells), tuple(moments), tuple(base_bytes), problem.splits)


def _most_swapped_bytes(problem: Problem) -> float:
    """Returns how many bytes a device may swap per micro-batch in flight.

    The host's limit is shared evenly among the micro-batches in flight on all devices.
    """
    limit = problem.host_limit_bytes
    if limit is None:
        return float("inf")
    return limit / sum(problem.group(s).replicas * k for s, k in enumerate(problem.in_flight))


def _decision(
    problem: Problem,
    bounds: Sequence[int],
    choose: Callable[[Problem, int, Sequence[Cell], Sequence[Holding]], Fates | None],
    moments: Moments | None = None,
) -> Decision | None:
    """Makes a decision by choosing fates for each device; None if a device has none that fit.

    Args:
        problem: says which stages each device has.
        bounds: of the stages.
        choose: called with the problem, a device, its stages and its moments. It returns the fates
            for the device's stages, layer by layer; None if none fit.
        moments: what each device has in flight; None: as in the problem's order.
    """
    places = problem.places
    chosen = [0] * bounds[-1]
    asked = moments or problem.schedule.held(problem.devices, problem.microbatches)
    for d, of_device in enumerate(asked):
        mine = [cell for cell in cells(bounds) if places[cell[0]] == d]
        fates = choose(problem, d, mine, of_device)
        if fates is None:
            return None
        rest = iter(fates)
        for _, i, j in mine:
            chosen[i:j] = islice(rest, j - i)
    return Decision(tuple(bounds), tuple(chosen))
