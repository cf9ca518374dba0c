"""The knapsack of AdaPipe: which residuals a stage keeps, so that least is computed again, for every segment at once.

Legend: k micro-batches are in flight on a stage. A layer has one treatment of several, none of which swaps. It holds at
least its smallest treatment's bytes; what a treatment holds beyond them is its weight, in quanta, rounded up, so that
the limit holds. The quantum is the weights' greatest common divisor, or the smallest multiple of it of which `QUANTA`
hold all that a stage may have: then a stage of n layers may leave n quanta unused. Cuts are compared with `QUANTA`, the
stages that result choose once more with `FINE_QUANTA`. Where everything can be kept, no quanta are counted. The
most that a layer works with is counted beside all that is held: by `stage_cost.py` a stage takes at most that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import gcd

import numpy as np
from jaxtyping import Float, Int

from jvpipe.papers.selection import treatments
from jvpipe.planners.model.segments import OverJ, Segments
from jvpipe.planners.model.stage_bytes import on_device_bytes, option_bytes

QUANTA = 512
FINE_QUANTA = 16 * QUANTA
CAPS_TIMES_LAYERS = 600
"""Bounds on what one layer's backward may need, of which the largest counts, not the sum: how many, times layers."""


@dataclass(frozen=True)
class Item:
    """A treatment: its choice, its bytes per micro-batch, its extra seconds, and what its backward needs."""

    choice: int
    bytes: int
    extra_s: float
    working_bytes: int


def items(segments: Segments) -> list[list[Item]]:
    """Lists each layer's treatments that do not swap, without those to which another is never worse."""
    per_layer = []
    for layer in segments.problem.costs.layers:
        rows = treatments(layer, 1)
        all_of = [
            Item(choice, row.held_bytes, row.extra_s, row.working_bytes)
            for choice in (*range(len(rows) - 1), -1)
            if (row := rows[choice]).swapped_bytes == 0
        ]
        all_of.sort(key=lambda x: (x.bytes, x.extra_s, x.working_bytes))
        kept: list[Item] = []
        for x in all_of:
            if all(y.extra_s > x.extra_s or y.working_bytes > x.working_bytes for y in kept):
                kept.append(x)
        per_layer.append(kept)
    return per_layer


def working_caps(layers: Sequence[Sequence[Item]]) -> list[int]:
    """Lists bounds on the working bytes, all that differ or some of them; under each every layer has a treatment."""
    least = max(min(x.working_bytes for x in layer) for layer in layers)
    caps = sorted({max(least, x.working_bytes) for layer in layers for x in layer})
    at = (
        np.linspace(0, len(caps) - 1, min(len(caps), max(3, CAPS_TIMES_LAYERS // len(layers))))
        .round()
        .astype(int)
    )
    return [caps[a] for a in at]


class Knapsack:
    """Treatments under one cap on their working bytes, weighed in q quanta for k micro-batches in flight."""

    def __init__(
        self, layers: Sequence[Sequence[Item]], cap_bytes: int, k: int, limit_bytes: int, q: int
    ) -> None:
        self.layers = [[x for x in layer if x.working_bytes <= cap_bytes] for layer in layers]
        self.base_bytes = np.array(
            [0, *accumulate(min(x.bytes for x in layer) for layer in self.layers)]
        )
        self.working_bytes = np.array(
            [max(x.working_bytes for x in layer) for layer in self.layers]
        )
        more = [[x.bytes - min(y.bytes for y in layer) for x in layer] for layer in self.layers]
        divisor = reduce(gcd, (w for layer in more for w in layer)) or 1
        largest = min(limit_bytes // k, sum(max(layer) for layer in more))
        self.in_flight, self.q = k, q
        self.quantum_bytes = divisor * max(1, -(-largest // (q * divisor)))
        self.weights = [[-(-w // self.quantum_bytes) for w in layer] for layer in more]

    def tables(self, ends: Sequence[int]) -> Iterator[tuple[int, Float[np.ndarray, "J Q"]]]:
        """Yields, for i from the last layer down, the least extra seconds of [i, j) by j and by its quanta.

        Rows above `ends[i]`, which falls with i, are left as they were.
        """
        n = len(self.layers)
        table = np.full((n + 1, self.q + 1), np.inf)
        table[n] = 0
        for i in reversed(range(n)):
            rows = table[i + 1 : ends[i] + 1]
            rows[...] = self._with(i, rows).min(0)
            table[i] = 0
            yield i, table

    def _with(self, layer: int, rest: np.ndarray) -> np.ndarray:
        """Seconds by treatment of a layer (first axis) and by quanta (last), `rest` being those without it."""
        by_treatment = np.full((len(self.layers[layer]), *rest.shape), np.inf)
        for x, w, out in zip(self.layers[layer], self.weights[layer], by_treatment, strict=True):
            if w <= self.q:
                np.add(rest[..., : self.q + 1 - w], x.extra_s, out=out[..., w:])
        return by_treatment

    def quanta(self, free_bytes: OverJ, i: int) -> Int[np.ndarray, "J"]:
        """Counts the quanta that [i, j) may take of the bytes that fixed ones leave; negative if it does not fit."""
        working = np.concatenate([np.zeros(i + 1), np.maximum.accumulate(self.working_bytes[i:])])
        left = (free_bytes - working) // self.in_flight - (self.base_bytes - self.base_bytes[i])
        return np.minimum(left // self.quantum_bytes, self.q).astype(int)

    def choose(self, i: int, j: int, quanta: int) -> tuple[float, list[int]]:
        """Finds the least extra seconds of [i, j) with so many quanta, and the choices.

        Args:
            i: the first layer.
            j: behind the last one.
            quanta: how many the choices may take.
        """
        rest, options = np.zeros(self.q + 1), []
        for layer in reversed(range(i, j)):
            options.insert(0, self._with(layer, rest))
            rest = options[0].min(0)
        choices, left = [], quanta
        for layer, option in zip(range(i, j), options, strict=True):
            best = int(option[:, left].argmin())
            choices.append(self.layers[layer][best].choice)
            left -= self.weights[layer][best]
        return float(rest[quanta]), choices


class Recomputation:
    """The best recomputation of every stage with every segment: `extra_s[s, i, j]`, and choices when asked for."""

    def __init__(self, segments: Segments) -> None:
        layers, stages = segments.problem.costs.layers, range(segments.problem.stages)
        self.segments = segments
        kept = [option_bytes(x, x.options[0]) for x in layers]
        self._kept_bytes = np.array([0, *accumulate(x.kept for x in kept)])
        self._working_bytes = np.array([x.working for x in kept])
        self._extra_s = np.array([0.0, *accumulate(x.options[0].extra_s for x in layers)])
        self.extra_s = np.stack(
            [[self._all_kept(s, i) for i in range(len(layers))] for s in stages]
        )
        self._items: list[list[Item]] = []
        self._caps: list[int] = []
        if np.isinf(self.extra_s).any():
            self._items = items(segments)
            self._caps = working_caps(self._items)
            for k in sorted(set(segments.in_flight)):
                of_k = [s for s in stages if segments.in_flight[s] == k]
                for knapsack in self._knapsacks(k, QUANTA):
                    self._fill(knapsack, of_k)

    def _free_bytes(self, s: int, i: int) -> OverJ:
        """What the limit leaves to residuals and to the work of one layer, over j."""
        limit = self.segments.problem.memory_limit_bytes
        return (np.inf if limit is None else float(limit)) - self.segments.row(s, i).fixed_bytes[0]

    def _all_kept(self, s: int, i: int) -> OverJ:
        """Extra seconds of [i, j) with everything kept, over j; infinite where it does not fit."""
        working = np.concatenate([np.zeros(i + 1), np.maximum.accumulate(self._working_bytes[i:])])
        taken = (
            on_device_bytes(self.segments.in_flight[s], self._kept_bytes - self._kept_bytes[i])
            + working
        )
        fits = (taken <= self._free_bytes(s, i)) | (np.arange(len(taken)) <= i)
        return np.where(fits, self._extra_s - self._extra_s[i], np.inf)

    def _knapsacks(self, k: int, q: int) -> list[Knapsack]:
        limit = self.segments.problem.memory_limit_bytes or 0
        return [Knapsack(self._items, cap, k, limit, q) for cap in self._caps]

    def _fill(self, knapsack: Knapsack, stages: Sequence[int]) -> None:
        """Takes over what a knapsack for these stages does better than what is known."""
        js = np.arange(len(knapsack.layers) + 1)
        for i, table in knapsack.tables(self._ends(knapsack, stages)):
            for s in stages:
                quanta = knapsack.quanta(self._free_bytes(s, i), i)
                seconds = np.where(quanta >= 0, table[js, np.maximum(quanta, 0)], np.inf)
                self.extra_s[s, i] = np.minimum(self.extra_s[s, i], seconds)

    def _ends(self, knapsack: Knapsack, stages: Sequence[int]) -> list[int]:
        """For each i, the last j that may fit on any of these stages: by parameters and smallest treatments alone."""
        own, limit = self.segments, self.segments.problem.memory_limit_bytes or 0
        versions = min(own.versions[s] for s in stages)
        least = versions * own.parameter_bytes + own.state_bytes
        least = least + on_device_bytes(knapsack.in_flight, knapsack.base_bytes)
        return [int(end) - 1 for end in np.searchsorted(least, least[:-1] + limit, side="right")]

    def choices(self, s: int, i: int, j: int) -> list[int]:
        """Gives the choices of stage s with layers [i, j), which fits.

        Args:
            s: the stage.
            i: its first layer.
            j: behind its last one.
        """
        if np.isfinite(self._all_kept(s, i)[j]):
            return [0] * (j - i)
        every = [
            knapsack.choose(i, j, quanta)
            for q in (QUANTA, FINE_QUANTA)
            for knapsack in self._knapsacks(self.segments.in_flight[s], q)
            if (quanta := int(knapsack.quanta(self._free_bytes(s, i), i)[j])) >= 0
        ]
        return min(every)[1]
