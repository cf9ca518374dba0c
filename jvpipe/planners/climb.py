"""From plans that the surrogate finds good to the one that the simulator finds best, among them and their neighbours.

A neighbour has one bound moved, by one layer or a few, one stage's fates chosen with or without swaps, or one layer's
fate changed: the surrogate takes a link that is not full for free, the simulator sees who waits for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from jvpipe.planners.forecast import simulated_step_s
from jvpipe.planners.memory import StageCost, stage_cost
from jvpipe.planners.prices import Pricing
from jvpipe.planners.problem import RERUN_ON, Decision, Problem
from jvpipe.planners.table import Cell, Effort, Hints, Table, cells

REACH = 4
"""By how many cuts a bound is moved at most."""
BEGIN = 3
"""Plans that are climbed from."""
FEW = 64
"""Layers of a model whose fates are changed one by one."""

Rank = tuple[float, int, int, int]


@dataclass
class Climb:
    """Plans judged by the simulator.

    `pricings` are ways to choose fates, as with or without swaps, and `hints` prices that fit them. It ends when so
    many `steps` have been simulated; new fates are looked for until so many `layers` have been looked at.
    """

    problem: Problem
    pricings: tuple[Pricing, ...]
    hints: tuple[Hints, ...]
    effort: Effort
    layers: int
    steps: int
    tables: dict[tuple[int, int], Table] = field(default_factory=dict)
    ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], Rank] = field(default_factory=dict)
    costs: dict[tuple[Cell, tuple[int, ...]], StageCost] = field(default_factory=dict)
    choices: dict[tuple[Cell, int], tuple[int, ...] | None] = field(default_factory=dict)

    def top(self, begin: Iterable[Decision]) -> Decision:
        """The best of what the best plans' better neighbours lead to."""
        ranked = {(x.bounds, x.choices): x for x in sorted(begin, key=self.rank)}
        return min(map(self._climbed, list(ranked.values())[:BEGIN]), key=self.rank)

    def _climbed(self, best: Decision) -> Decision:
        """From neighbour to better neighbour, until none is better."""
        while self.steps > 0:
            before = best
            for neighbour in self._neighbours(best):
                if self.steps > 0 and self.rank(neighbour) < self.rank(best):
                    best = neighbour
                    break
            if best is before:
                break
        return best

    def rank(self, decision: Decision) -> Rank:
        """Simulated seconds (to ten digits), peak bytes, swapped bytes, and layers that do not keep all."""
        key = decision.bounds, decision.choices
        if key not in self.ranks:
            stages = [self._cost(cell, decision.choices) for cell in cells(decision.bounds)]
            peak, host = max(x.peak_bytes for x in stages), sum(x.host_bytes for x in stages)
            memory, swapped = self.problem.memory_limit_bytes, self.problem.host_limit_bytes
            fits = (memory is None or peak <= memory) and (swapped is None or host <= swapped)
            step_s = float(f"{simulated_step_s(self.problem, stages):.9e}") if fits else np.inf
            self.steps -= fits
            self.ranks[key] = step_s, peak, host, sum(choice != 0 for choice in decision.choices)
        return self.ranks[key]

    def with_best_fates(self, bounds: Sequence[int]) -> list[Decision]:
        """These cuts with the fates of the fewest seconds, chosen in each way, where anything fits."""
        ways = ([self._best(cell, way) for cell in cells(tuple(bounds))] for way in range(len(self.pricings)))
        whole = ([choices for choices in found if choices is not None] for found in ways)
        return [Decision(tuple(bounds), tuple(chain(*found))) for found in whole if len(found) == len(bounds) - 1]

    def _cost(self, cell: Cell, choices: Sequence[int]) -> StageCost:
        s, i, j = cell
        key = cell, tuple(choices[i:j])
        if key not in self.costs:
            self.costs[key] = stage_cost(self.problem, s, i, j, choices)
        return self.costs[key]

    def _best(self, cell: Cell, way: int) -> tuple[int, ...] | None:
        """A stage's fates of the fewest seconds; None if none fit."""
        if (cell, way) not in self.choices:
            table = self._table(cell, way)
            before = table.layers
            table.settle(cell)
            self.layers -= table.layers - before
            self.choices[cell, way] = table.cell_choices(cell) if table.fits(cell) else None
        return self.choices[cell, way]

    def _table(self, cell: Cell, way: int) -> Table:
        """A table with a cell, and with those near it."""
        s, i, j = cell
        table = self.tables.get((s, way))
        if table is None or i not in table.cuts[0] or j not in table.cuts[1]:
            cuts, stages = self.pricings[way].segments.cuts, self.problem.stages
            starts = cuts[np.abs(np.arange(len(cuts)) - np.searchsorted(cuts, i)) <= REACH] if s else cuts[:1]
            ends = (
                cuts[np.abs(np.arange(len(cuts)) - np.searchsorted(cuts, j)) <= REACH] if s < stages - 1 else cuts[-1:]
            )
            table = Table(self.pricings[way], [starts, ends], self.effort, first=s, hints=self.hints[way])
            self.tables[s, way] = table
        return table

    def _neighbours(self, decision: Decision) -> Iterator[Decision]:
        found = cells(decision.bounds)
        seconds = [self._cost(cell, decision.choices).seconds for cell in found]
        # First of all the bounds beside the slowest stages.
        for s in sorted(range(1, self.problem.stages), key=lambda s: -max(seconds[s - 1 : s + 1])):
            for moved in self._near(decision.bounds, s):
                (_, i, _b), (_, _, j) = found[s - 1 : s + 1]
                yield from self._changed(decision, ((s - 1, i, moved), (s, moved, j)))
        for cell in found:
            yield from self._changed(decision, (cell,))
        choices = decision.choices
        if self.problem.memory_limit_bytes is not None and len(choices) <= FEW:
            for at, layer in enumerate(self.problem.costs.layers):
                if RERUN_ON not in choices[at : at + 2]:  # a run would lose its beginning
                    for other in range(len(layer.options)):
                        yield Decision(decision.bounds, (*choices[:at], other, *choices[at + 1 :]))

    def _near(self, bounds: Sequence[int], s: int) -> Iterator[int]:
        """Other places for a bound."""
        cuts = self.pricings[0].segments.cuts
        place = int(np.searchsorted(cuts, bounds[s]))
        for by in (-1, 1, -2, 2, -REACH, REACH):
            if 0 <= place + by < len(cuts) and bounds[s - 1] < cuts[place + by] < bounds[s + 1]:
                yield int(cuts[place + by])

    def _changed(self, decision: Decision, new: Sequence[Cell]) -> Iterator[Decision]:
        """The decision with some stages beside each other in the place of those that were there."""
        first, last = new[0], new[-1]
        bounds = (*decision.bounds[: first[0] + 1], *(cell[2] for cell in new), *decision.bounds[last[0] + 2 :])
        for way in range(len(self.pricings)):
            if self.layers > 0 or all((cell, way) in self.choices for cell in new):
                found = [self._best(cell, way) for cell in new]
                if None not in found:
                    inner = chain(*(x for x in found if x))
                    yield Decision(bounds, (*decision.choices[: first[1]], *inner, *decision.choices[last[2] :]))
