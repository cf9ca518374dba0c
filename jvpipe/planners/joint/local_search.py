"""From plans that the surrogate finds good to the one that the simulator finds best, among them and their neighbours.

A neighbour has one bound moved to any other place, one stage's fates chosen with or without swaps, or one layer's
fate changed: the surrogate takes a link that is not full for free, the simulator sees who waits for it. All places of a
bound are looked at, those that take least (`least_steps_s`) first, until no place can be better: on two stages nothing
is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import PLAN
from jvpipe.planners.joint.segment_table import Cell, Effort, Hints, Table, cells
from jvpipe.planners.model.forecast import least_steps_s, simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.segments import Cuts
from jvpipe.planners.model.stage_cost import StageCost, device_bytes, needed_limit_bytes, stage_cost

Rank = tuple[float, int, int, int]


@dataclass
class LocalSearch:
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
    tables: dict[tuple[int, ...], Table] = field(default_factory=dict)
    ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], Rank] = field(default_factory=dict)
    costs: dict[tuple[Cell, tuple[int, ...]], StageCost] = field(default_factory=dict)
    choices: dict[tuple[Cell, int], tuple[int, ...] | None] = field(default_factory=dict)

    def top(self, begin: Iterable[Decision]) -> Decision:
        """The best of what the best plans' better neighbours lead to."""
        ranked = {(x.bounds, x.choices): x for x in sorted(begin, key=self.rank)}
        return min(map(self._climbed, list(ranked.values())[: PLAN.starts]), key=self.rank)

    def _climbed(self, best: Decision) -> Decision:
        """From neighbour to better neighbour, until none is better."""
        before = None
        while before is not best and self.steps > 0:
            before = best
            for s in self._bounds(best):
                best = self._best_of(best, self._moved(best, s))
            best = self._best_of(best, self._with_other_fates(best))
        return best

    def _best_of(self, best: Decision, neighbours: Iterable[Decision]) -> Decision:
        """A decision, or the best of its neighbours."""
        start = best
        for neighbour in neighbours:
            if self.steps <= 0:
                break
            best = min(best, neighbour, key=self.rank)
        return best if self.rank(best) < self.rank(start) else start

    def rank(self, decision: Decision) -> Rank:
        """Simulated seconds (to ten digits), peak bytes, swapped bytes, and layers that do not keep all."""
        key = decision.bounds, decision.choices
        if key not in self.ranks:
            stages = [self._cost(cell, decision.choices) for cell in cells(decision.bounds)]
            peak = needed_limit_bytes(self.problem, device_bytes(self.problem, stages))
            host = sum(x.host_bytes for x in stages)
            memory, swapped = self.problem.memory_limit_bytes, self.problem.host_limit_bytes
            fits = (memory is None or peak <= memory) and (swapped is None or host <= swapped)
            step_s = float(f"{simulated_step_s(self.problem, stages):.9e}") if fits else np.inf
            self.steps -= fits
            self.ranks[key] = step_s, peak, host, sum(choice != 0 for choice in decision.choices)
        return self.ranks[key]

    def with_best_fates(self, bounds: Sequence[int]) -> list[Decision]:
        """These cuts with the fates of the fewest seconds, chosen in each way, where anything fits."""
        if self.layers <= 0:
            return []
        ways = (
            [self._best(cell, way) for cell in cells(tuple(bounds))]
            for way in range(len(self.pricings))
        )
        whole = ([choices for choices in stages if choices is not None] for stages in ways)
        return [
            Decision(tuple(bounds), tuple(chain(*stages)))
            for stages in whole
            if len(stages) == len(bounds) - 1
        ]

    def _cost(self, cell: Cell, choices: Sequence[int]) -> StageCost:
        s, i, j = cell
        key = cell, tuple(choices[i:j])
        if key not in self.costs:
            self.costs[key] = stage_cost(self.problem, s, i, j, choices)
        return self.costs[key]

    def _best(self, cell: Cell, way: int, table: Table | None = None) -> tuple[int, ...] | None:
        """A stage's fates of the fewest seconds, by a table that has it; None if none fit."""
        if (cell, way) not in self.choices:
            table = table or self._table(way, cell[0], np.array(cell[1:2]), np.array(cell[2:]))
            before = table.layers
            table.settle(cell)
            self.layers -= table.layers - before
            self.choices[cell, way] = table.cell_choices(cell) if table.fits(cell) else None
        return self.choices[cell, way]

    def _table(self, way: int, s: int, starts: Cuts, ends: Cuts) -> Table:
        """The table of one stage."""
        key = way, s, int(starts[0]), int(starts[-1]), int(ends[0]), int(ends[-1])
        if key not in self.tables:
            self.tables[key] = Table(
                self.pricings[way], [starts, ends], self.effort, first=s, hints=self.hints[way]
            )
        return self.tables[key]

    def _bounds(self, decision: Decision) -> list[int]:
        """All bounds, first those beside the slowest stages."""
        seconds = [self._cost(cell, decision.choices).seconds for cell in cells(decision.bounds)]
        return sorted(range(1, self.problem.stages), key=lambda s: -max(seconds[s - 1 : s + 1]))

    def _moved(self, decision: Decision, s: int) -> Iterator[Decision]:
        """The decision with bound s at other places, the most promising ones first, while one may be better."""
        cuts = self.pricings[0].segments.cuts
        before, after = decision.bounds[s - 1], decision.bounds[s + 1]
        places = cuts[(before < cuts) & (cuts < after)]
        moves: list[tuple[float, int, int]] = []
        tables = []
        for way in range(len(self.pricings)):
            pair = (
                self._table(way, s - 1, np.array([before]), places),
                self._table(way, s, places, np.array([after])),
            )
            tables.append(pair)
            least_s = self._least_s(decision, s, pair)
            moves += zip(least_s.tolist(), range(len(places)), [way] * len(places), strict=True)
        best_s = self.rank(decision)[0]
        moves = sorted(move for move in moves if move[0] < best_s)
        for least_s, place, way in moves if self.problem.stages == 2 else moves[: PLAN.places]:
            if least_s >= best_s:
                break
            bound = int(places[place])
            new = (s - 1, before, bound), (s, bound, after)
            for moved in self._changed(decision, new, way, tables[way]):
                best_s = min(best_s, self.rank(moved)[0])
                yield moved

    def _least_s(self, decision: Decision, s: int, tables: tuple[Table, Table]) -> np.ndarray:
        """What the decision takes at least with bound s at other places; infinite where nothing fits."""
        left, right = (table.stages[0] for table in tables)
        runs = len(left.block.ends)
        every, one = np.arange(runs), np.zeros(runs, dtype=np.int64)
        costs = (self._cost(cell, decision.choices) for cell in cells(decision.bounds))
        loads_s = np.array([cost.loads_s for cost in costs])[:, :, None].repeat(runs, axis=2)
        loads_s[s - 1 : s + 1] = left.loads_s(one, every), right.loads_s(every, one)
        return least_steps_s(self.problem, loads_s)

    def _with_other_fates(self, decision: Decision) -> Iterator[Decision]:
        for cell in cells(decision.bounds):
            for way in range(len(self.pricings)):
                yield from self._changed(decision, (cell,), way)
        choices = decision.choices
        if self.problem.memory_limit_bytes is not None and len(choices) <= PLAN.single_fate_layers:
            for at, layer in enumerate(self.problem.costs.layers):
                if RECOMPUTE_CHAIN not in choices[at : at + 2]:  # a run would lose its beginning
                    for other in range(len(layer.options)):
                        yield Decision(decision.bounds, (*choices[:at], other, *choices[at + 1 :]))

    def _changed(
        self,
        decision: Decision,
        new: Sequence[Cell],
        way: int,
        tables: Sequence[Table | None] = (None, None),
    ) -> Iterator[Decision]:
        """The decision with some stages beside each other in the place of those that were there, if any fates fit."""
        first, last = new[0], new[-1]
        bounds = (
            *decision.bounds[: first[0] + 1],
            *(cell[2] for cell in new),
            *decision.bounds[last[0] + 2 :],
        )
        if self.layers > 0 or all((cell, way) in self.choices for cell in new):
            fates = [self._best(cell, way, table) for cell, table in zip(new, tables, strict=False)]
            if None not in fates:
                inner = chain(*(x for x in fates if x))
                yield Decision(
                    bounds, (*decision.choices[: first[1]], *inner, *decision.choices[last[2] :])
                )
