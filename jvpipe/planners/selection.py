"""One stage while its fates are being chosen: a choice per layer, changed one at a time.

Legend: k micro-batches are in flight. A choice is an index into a layer's options, or `RERUN`; runs of several layers
(`RERUN_ON`) are not among the published planners' choices. A swapped byte stays on the device for min(k, 2) of the k.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.footprint import Footprints
from jvpipe.planners.problem import RERUN, Problem


class Treatment(NamedTuple):
    """What a choice takes: bytes held for all micro-batches in flight, bytes swapped for each, and for the backward."""

    held_bytes: int
    swapped_bytes: int
    extra_s: float
    working_bytes: int

    def is_no_better_than(self, other: "Treatment") -> bool:
        """Whether the other takes at most as much of everything."""
        return all(mine >= others for mine, others in zip(self, other, strict=True))


def treatments(layer: LayerCost, k: int) -> tuple[Treatment, ...]:
    """A layer's choices when k micro-batches are in flight; the last, found at -1, is `RERUN`."""
    found = []
    for option in layer.options:
        swapped = option.swapped_bytes + (layer.input_bytes if option.swaps_input else 0)
        kept = option.kept_bytes + (0 if option.swaps_input else layer.input_bytes)
        held = k * kept + min(k, 2) * swapped
        found.append(Treatment(held, swapped, option.extra_s, option.extra_bytes + layer.temporary_bytes))
    working = layer.options[0].kept_bytes + layer.temporary_bytes
    return (*found, Treatment(k * layer.input_bytes, 0, layer.forward_s, working))


class Move(NamedTuple):
    """Another choice for a layer that holds fewer bytes."""

    layer: int
    choice: int
    saved_bytes: int
    swapped_bytes: int  # more than before, for each micro-batch
    extra_s: float  # more than before

    @property
    def per_second(self) -> float:
        """Bytes saved per second of recomputation."""
        return self.saved_bytes / self.extra_s if self.extra_s > 0 else float("inf")


class Moves:
    """All layers' treatments and the moves between them, for k micro-batches in flight."""

    def __init__(self, problem: Problem, k: int) -> None:
        self.layers = [treatments(layer, k) for layer in problem.costs.layers]
        self.least_bytes = [0, *accumulate(min(t.held_bytes for t in layer) for layer in self.layers)]
        self._found: dict[tuple[int, int], list[Move]] = {}

    def after(self, layer: int, choice: int) -> list[Move]:
        """The moves of a layer that is at `choice`; `RERUN` only where no option is as good."""
        if (layer, choice) not in self._found:
            *options, rerun = self.layers[layer]
            now = self.layers[layer][choice]
            choices = dict(enumerate(options))
            if not any(rerun.is_no_better_than(option) for option in options):
                choices[RERUN] = rerun
            self._found[layer, choice] = [
                Move(
                    layer,
                    c,
                    now.held_bytes - t.held_bytes,
                    t.swapped_bytes - now.swapped_bytes,
                    t.extra_s - now.extra_s,
                )
                for c, t in choices.items()
                if t.held_bytes < now.held_bytes
            ]
        return self._found[layer, choice]

    def swaps(self, layer: int, choice: int) -> list[Move]:
        """Those that swap more and recompute no more."""
        return [m for m in self.after(layer, choice) if m.swapped_bytes > 0 and m.extra_s <= 0]

    def recomputes(self, layer: int, choice: int) -> list[Move]:
        """Of those that swap no more, the one that saves most per second (or none)."""
        found = [m for m in self.after(layer, choice) if m.swapped_bytes <= 0]
        return [max(found, key=lambda m: (m.per_second, m.saved_bytes))] if found else []


class Selection:
    """Stage s with layers [i, j), everything kept at first. Its numbers equal those of `stage_cost`."""

    def __init__(self, footprints: Footprints, moves: Moves, s: int, i: int, j: int) -> None:
        problem = footprints.problem
        self.problem, self.footprints, self.moves, self.first = problem, footprints, moves, i
        self.k = footprints.k[s]
        self.choices = [0] * (j - i)
        self.fixed_bytes = int(footprints.fixed_bytes(s, i)[j])
        self.traffic_s = float(footprints.traffic_s(i)[j])
        self.comm_s = float(footprints.comm_s(i)[j])
        self.forward_s = float(footprints.forward_s[j] - footprints.forward_s[i])
        now = [layer[0] for layer in moves.layers[i:j]]
        self.compute_s = float(footprints.compute_s[j] - footprints.compute_s[i]) + sum(t.extra_s for t in now)
        self.held_bytes = sum(t.held_bytes for t in now)
        self.swapped_bytes = sum(t.swapped_bytes for t in now)
        self._working = [t.working_bytes for t in now]

    @property
    def layers(self) -> range:
        """The stage's layers."""
        return range(self.first, self.first + len(self.choices))

    def later_s(self, layer: int) -> float:
        """Forward and backward seconds of the stage's layers after this one."""
        total = self.footprints.compute_s
        return float(total[self.layers.stop] - total[layer + 1])

    @property
    def peak_bytes(self) -> int:
        """What the device holds at most."""
        return self.fixed_bytes + self.held_bytes + max(self._working)

    @property
    def excess_bytes(self) -> int:
        """By how much the device is over its limit, or the host over this stage's equal share of its limit; or 0."""
        device, host = self.problem.memory_limit_bytes, self.problem.host_limit_bytes
        over = 0 if device is None else max(0, self.peak_bytes - device)
        share = None if host is None else host // self.problem.stages
        return over if share is None else max(over, self.k * self.swapped_bytes - share)

    @property
    def may_fit(self) -> bool:
        """Whether the limit leaves room for the smallest treatments."""
        limit, least = self.problem.memory_limit_bytes, self.moves.least_bytes
        return limit is None or self.fixed_bytes + least[self.layers.stop] - least[self.first] <= limit

    def link_s(self, more_bytes: int = 0) -> float:
        """How long the link to the host is busy per micro-batch, if so many more bytes are swapped."""
        return 2 * self.problem.host.seconds(self.swapped_bytes + more_bytes) + self.traffic_s

    @property
    def seconds(self) -> float:
        """How far apart micro-batches are: the slowest of the device and its links to the host and to other stages."""
        return max(self.compute_s, self.link_s(), self.comm_s)

    def hides(self, move: Move) -> bool:
        """Whether the link to the host has room for what the move swaps while the device computes, and the host too."""
        return self.host_has_room(move) and self.link_s(move.swapped_bytes) <= self.compute_s

    def host_has_room(self, move: Move) -> bool:
        """Whether the stage's share of the host holds what the move swaps."""
        limit = self.problem.host_limit_bytes
        swapped = self.swapped_bytes + move.swapped_bytes
        return limit is None or move.swapped_bytes <= 0 or self.k * swapped <= limit // self.problem.stages

    def take(self, move: Move) -> None:
        """Changes one layer's choice."""
        self.choices[move.layer - self.first] = move.choice
        self._working[move.layer - self.first] = self.moves.layers[move.layer][move.choice].working_bytes
        self.held_bytes -= move.saved_bytes
        self.swapped_bytes += move.swapped_bytes
        self.compute_s += move.extra_s

    def spend(
        self,
        moves: Callable[[int, int], Iterable[Move]],
        score: Callable[[Move], float],
        allowed: Callable[[Move], bool],
    ) -> None:
        """Takes moves, the best score first, until the stage fits or none is left that is allowed."""

        def entries(layer: int) -> list[tuple[float, int, int, Move]]:
            choice = self.choices[layer - self.first]
            return [(-float(score(move)), -move.saved_bytes, choice, move) for move in moves(layer, choice)]

        heap = [entry for layer in self.layers for entry in entries(layer)]
        heapify(heap)
        while heap and self.excess_bytes > 0:
            _, _, choice, move = heappop(heap)
            if self.choices[move.layer - self.first] == choice and allowed(move):
                self.take(move)
                for entry in entries(move.layer):
                    heappush(heap, entry)
