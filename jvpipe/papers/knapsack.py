"""AdaPipe's knapsack, which finds the fastest recomputation for every stage and segment.

Paper: Sun et al., ASPLOS 2024, the first of the paper's two dynamic programs.

Legend:
    k           the number of micro-batches in flight on a stage
    item        a way to treat a layer's residuals, without swaps; each layer gets one item
    weight      an item's bytes beyond those of the layer's smallest item, counted in quanta and
                rounded up, so that the limit is kept
    quantum     the unit of bytes: the least multiple of the greatest common divisor of all weights
                in bytes with which `PAPER.quanta` quanta cover all bytes that a stage may use
    cap         a bound on working bytes, which one layer's backward needs while it runs; several
                caps are tried, each in a knapsack that leaves out the items that need more

    table[j, q]     the least extra seconds of layers [i, j) with q quanta; i goes from the last
                    layer to 0, and each step adds layer i to all rows j > i

Rounding up wastes up to one quantum per layer, unless the quantum is the divisor itself: a stage of
n layers may leave n quanta unused. So cuts are compared with `PAPER.quanta`, and then the stages of
the best cuts choose again with `PAPER.fine_quanta`, which makes a quantum smaller. A stage that can
keep everything needs no knapsack.

A stage counts the bytes that its layers hold, plus the largest working bytes of a layer. The count
is never below that of `stage_cost.py`, which subtracts the bytes that later layers' backwards have
freed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from math import gcd

import numpy as np
from jaxtyping import Float, Int

from jvpipe.papers.paper_effort import PAPER
from jvpipe.papers.selection import treatments
from jvpipe.planners.model.grids import OverJ
from jvpipe.planners.model.problem import RECOMPUTE
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_bytes import on_device_bytes, option_bytes


@dataclass(frozen=True)
class Item:
    """A choice for a layer's residuals, with its bytes per micro-batch and its extra seconds."""

    choice: int
    bytes: int
    extra_s: float
    working_bytes: int


def items(segments: Segments) -> list[list[Item]]:
    """Lists each layer's items, without those that another item equals or beats in all respects."""
    per_layer = []
    for layer in segments.problem.costs.layers:
        choices = *range(len(layer.options)), RECOMPUTE
        all_of: list[Item] = []
        for choice, x in zip(choices, treatments(layer), strict=True):
            if not x.swapped:
                all_of.append(Item(choice, x.kept, x.extra_s, x.working))
        all_of.sort(key=lambda x: (x.bytes, x.extra_s, x.working_bytes))
        # Items come in ascending order of bytes. An item is dropped if an earlier item takes no
        # more seconds and no more working bytes.
        kept: list[Item] = []
        for x in all_of:
            no_slower = [y for y in kept if y.extra_s <= x.extra_s]
            if not any(y.working_bytes <= x.working_bytes for y in no_slower):
                kept.append(x)
        per_layer.append(kept)
    return per_layer


def working_caps(layers: Sequence[Sequence[Item]]) -> list[int]:
    """Lists caps on working bytes: all values that items have, or a selection if there are many.

    Each cap must leave an item to every layer. So no cap is below the least working bytes of any
    layer.
    """
    of_layers = [[x.working_bytes for x in layer] for layer in layers]
    least = max(map(min, of_layers))
    every = chain.from_iterable(of_layers)
    caps = sorted({max(least, working_bytes) for working_bytes in every})
    allowed = max(3, PAPER.caps_times_layers // len(layers))
    count = min(len(caps), allowed)
    places = np.linspace(0, len(caps) - 1, count).round()
    return [caps[int(place)] for place in places]


class Knapsack:
    """The knapsack of the items under one cap.

    Args:
        layers: the items of each layer.
        cap_bytes: the cap: items with more working bytes are left out.
        k: the number of micro-batches in flight.
        limit_bytes: the memory limit of a device.
        q: the number of quanta that a stage may use.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Item]],
        cap_bytes: int,
        k: int,
        limit_bytes: int,
        q: int,
    ) -> None:
        self.layers: list[list[Item]] = []
        for layer in layers:
            self.layers.append([x for x in layer if x.working_bytes <= cap_bytes])
        smallest = [min(x.bytes for x in layer) for layer in self.layers]
        largest_working = [max(x.working_bytes for x in layer) for layer in self.layers]
        self.base_bytes = np.array([0, *accumulate(smallest)])
        self.working_bytes = np.array(largest_working)
        pairs = zip(self.layers, smallest, strict=True)
        more = [[x.bytes - least for x in layer] for layer, least in pairs]
        divisor = reduce(gcd, chain.from_iterable(more)) or 1
        # A micro-batch takes at most its share of the limit, and at most the bytes of the largest
        # items.
        of_microbatch = limit_bytes // k
        everything = sum(map(max, more))
        largest = min(of_microbatch, everything)
        self.in_flight = k
        self.q = q
        # The quantum is the least multiple of the divisor for which q quanta cover all usable
        # bytes.
        multiple = -(-largest // (q * divisor))
        quantum_bytes = divisor * max(1, multiple)
        self.quantum_bytes = quantum_bytes
        self.weights = [[-(-w // quantum_bytes) for w in layer] for layer in more]

    def tables(
        self,
        ends: Sequence[int],
    ) -> Iterator[tuple[int, Float[np.ndarray, "J Q"]]]:
        """Yields i and table[j, q], for i from the last layer down to 0; all tables are one array.

        Args:
            ends: for each i, the last j that is needed; rows of larger j are not updated. The last
                j must not rise as i falls, because a stale row would then be read.
        """
        n = len(self.layers)
        table = np.full((n + 1, self.q + 1), np.inf)
        table[n] = 0
        # Adding layer i turns row j of the table from that of [i + 1, j) into that of [i, j).
        for i in reversed(range(n)):
            rows = table[i + 1 : ends[i] + 1]
            by_item = self._with(i, rows)
            rows[...] = by_item.min(0)
            table[i] = 0
            yield i, table

    def _with(self, layer: int, rest: np.ndarray) -> np.ndarray:
        """Adds a layer to a table.

        Args:
            layer: the number of the layer.
            rest: the extra seconds of the other layers, by quanta along the last axis.

        Returns:
            The extra seconds with the layer. The first axis is the layer's item, the last axis is
            quanta.
        """
        of_layer = self.layers[layer]
        by_item = np.full((len(of_layer), *rest.shape), np.inf)
        rows = zip(of_layer, self.weights[layer], by_item, strict=True)
        for x, w, out in rows:
            if w <= self.q:
                left = rest[..., : self.q + 1 - w]
                # This layer takes w of q quanta, so the other layers have q - w.
                np.add(left, x.extra_s, out=out[..., w:])
        return by_item

    def quanta(self, free_bytes: OverJ, i: int) -> Int[np.ndarray, "J"]:
        """Returns for each j how many quanta [i, j) may use.

        The number is negative if [i, j) does not fit even with its smallest items.

        Args:
            free_bytes: for each j, the bytes that [i, j) has for residuals and for work.
            i: the first layer.
        """
        working = _most_working(self.working_bytes, i)
        # Quanta count only the bytes beyond the smallest items of [i, j).
        base = self.base_bytes - self.base_bytes[i]
        of_microbatch = (free_bytes - working) // self.in_flight
        left = of_microbatch - base
        quanta = left // self.quantum_bytes
        return np.minimum(quanta, self.q).astype(int)

    def choose(
        self,
        i: int,
        j: int,
        quanta: int,
    ) -> tuple[float, list[int]]:
        """Finds the least extra seconds of [i, j) and the choices that take them.

        Args:
            i: the first layer.
            j: one more than the last layer.
            quanta: how many quanta the choices may use.
        """
        rest = np.zeros(self.q + 1)
        options = []
        for layer in reversed(range(i, j)):
            by_item = self._with(layer, rest)
            options.insert(0, by_item)
            rest = by_item.min(0)
        choices = []
        left = quanta
        for layer, option in zip(range(i, j), options, strict=True):
            # The item with the smallest entry gives the least seconds.
            best = int(option[:, left].argmin())
            choices.append(self.layers[layer][best].choice)
            left -= self.weights[layer][best]
        return float(rest[quanta]), choices


def _most_working(working_bytes: np.ndarray, i: int) -> Float[np.ndarray, "J"]:
    """Returns for each j the largest working bytes of layers [i, j); 0 for no layer.

    Args:
        working_bytes: the working bytes of each layer.
        i: the first layer.
    """
    running = np.maximum.accumulate(working_bytes[i:])
    return np.concatenate([np.zeros(i + 1), running])


class Recomputation:
    """The best recomputation of every stage with every segment.

    Attributes:
        extra_s: extra_s[s, i, j] is the least extra seconds of stage s with layers [i, j); infinite
            if they do not fit.
    """

    def __init__(self, segments: Segments) -> None:
        layers = segments.problem.costs.layers
        stages = range(segments.problem.stages)
        self.segments = segments
        kept = [option_bytes(layer, layer.options[0]) for layer in layers]
        kept_bytes = accumulate(x.kept for x in kept)
        extra_s = accumulate(layer.options[0].extra_s for layer in layers)
        # If everything is kept: prefix sums of bytes and of seconds, and each layer's working
        # bytes.
        self._kept_bytes = np.array([0, *kept_bytes])
        self._working_bytes = np.array([x.working for x in kept])
        self._extra_s = np.array([0.0, *extra_s])
        all_kept = []
        for s in stages:
            of_stage = [self._all_kept(s, i) for i in range(len(layers))]
            all_kept.append(of_stage)
        self.extra_s = np.stack(all_kept)
        self._items: list[list[Item]] = []
        self._caps: list[int] = []
        # If every segment fits with everything kept, no knapsack is needed.
        if np.isinf(self.extra_s).any():
            self._items = items(segments)
            self._caps = working_caps(self._items)
            stages_of: dict[int, list[int]] = {}
            for s in stages:
                k = segments.in_flight[s]
                stages_of.setdefault(k, []).append(s)
            for k, of_k in sorted(stages_of.items()):
                for knapsack in self._knapsacks(k, PAPER.quanta):
                    self._fill(knapsack, of_k)

    def _free_bytes(self, s: int, i: int) -> OverJ:
        """Returns for each j the bytes that stage s with [i, j) has for residuals and for work."""
        limit = self.segments.problem.memory_limit_bytes
        limit_bytes = np.inf if limit is None else float(limit)
        return limit_bytes - self.segments.row(s, i).fixed_bytes[0]

    def _all_kept(self, s: int, i: int) -> OverJ:
        """Returns for each j the extra seconds of [i, j), all kept; infinite if it does not fit."""
        k = self.segments.in_flight[s]
        working = _most_working(self._working_bytes, i)
        kept = self._kept_bytes - self._kept_bytes[i]
        held_bytes = on_device_bytes(k, kept)
        taken = held_bytes + working
        # An entry with j <= i is not a segment. It counts as fitting, so that no knapsack is made
        # for it.
        is_empty = np.arange(len(taken)) <= i
        fits = (taken <= self._free_bytes(s, i)) | is_empty
        extra_s = self._extra_s - self._extra_s[i]
        return np.where(fits, extra_s, np.inf)

    def _knapsacks(self, k: int, q: int) -> list[Knapsack]:
        """Returns the knapsacks of all caps, for k micro-batches in flight and q quanta."""
        limit = self.segments.problem.memory_limit_bytes or 0
        return [Knapsack(self._items, cap, k, limit, q) for cap in self._caps]

    def _fill(self, knapsack: Knapsack, stages: Sequence[int]) -> None:
        """Lowers the entries of `extra_s` for which a knapsack finds fewer seconds."""
        js = np.arange(len(knapsack.layers) + 1)
        for i, table in knapsack.tables(self._ends(knapsack, stages)):
            for s in stages:
                quanta = knapsack.quanta(self._free_bytes(s, i), i)
                column = np.maximum(quanta, 0)
                seconds = np.where(quanta >= 0, table[js, column], np.inf)
                so_far = self.extra_s[s, i]
                np.minimum(so_far, seconds, out=so_far)

    def _ends(self, knapsack: Knapsack, stages: Sequence[int]) -> list[int]:
        """Returns for each i the last j for which [i, j) may fit with its smallest items."""
        segments = self.segments
        limit = self.segments.problem.memory_limit_bytes or 0
        # A segment takes the fewest bytes on the stage with the fewest versions of parameters. If
        # it is over the limit there, it fits on no stage.
        versions = min(segments.versions[s] for s in stages)
        fixed = versions * segments.parameter_bytes + segments.state_bytes
        held_bytes = on_device_bytes(knapsack.in_flight, knapsack.base_bytes)
        least = fixed + held_bytes
        largest = least[:-1] + limit
        ends = np.searchsorted(least, largest, side="right")
        return [int(end) - 1 for end in ends]

    def choices(self, s: int, i: int, j: int) -> list[int]:
        """Returns the choices of stage s with layers [i, j), which must fit.

        Args:
            s: the number of the stage.
            i: its first layer.
            j: one more than its last layer.
        """
        all_kept_s = self._all_kept(s, i)[j]
        if np.isfinite(all_kept_s):
            return [0] * (j - i)
        free_bytes = self._free_bytes(s, i)
        k = self.segments.in_flight[s]
        every: list[tuple[float, list[int]]] = []
        coarse = self._knapsacks(k, PAPER.quanta)
        fine = self._knapsacks(k, PAPER.fine_quanta)
        for knapsack in (*coarse, *fine):
            quanta = int(knapsack.quanta(free_bytes, i)[j])
            if quanta >= 0:
                every.append(knapsack.choose(i, j, quanta))
        _, choices = min(every)
        return choices
