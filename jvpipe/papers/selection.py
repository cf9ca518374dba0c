"""One stage whose fates are chosen greedily, by changing one layer's choice at a time.

A fate says whether a value is kept, swapped to the host or recomputed. Two algorithms use this
file: vPipe's algorithm 2, and Capuchin's optimization in DawnPiper's form. They differ in the
changes that they consider, and in the order in which they take changes (`Selection.spend`).

Legend:
    k           the number of micro-batches in flight on the stage
    choice      the fates of a layer: an index into the layer's options, or `RECOMPUTE`

A swapped byte stays on the device for min(k, 2) of the k micro-batches.
"""

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import le
from typing import NamedTuple

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.model.problem import RECOMPUTE, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_bytes import (
    LayerBytes,
    on_device_bytes,
    option_bytes,
    recomputed_bytes,
)


def treatments(layer: LayerCost) -> list[LayerBytes]:
    """Returns the bytes and the extra seconds of a layer's choices.

    The last item is for `RECOMPUTE`, which is -1. So every choice is an index into the list.
    """
    every = [option_bytes(layer, option) for option in layer.options]
    return [*every, recomputed_bytes(layer)]


class FateChange(NamedTuple):
    """A change of a layer's choice to one that holds fewer bytes."""

    layer: int
    choice: int
    saved_bytes: int
    swapped_bytes: int  # how many more bytes than before are swapped for each micro-batch
    extra_s: float  # how many more seconds than before the backward takes

    @property
    def per_second(self) -> float:
        """Bytes saved per second of recomputation."""
        return self.saved_bytes / self.extra_s if self.extra_s > 0 else float("inf")


class FateChanges:
    """The treatments of all layers and the changes between them, for k micro-batches in flight.

    Attributes:
        layers: the treatments of each layer: the bytes and the extra seconds of its choices.
        held_bytes: for each layer, the bytes that each treatment leaves on the device, for all
            micro-batches in flight together.
        least_bytes: prefix sums of the fewest bytes that each layer can hold.
    """

    def __init__(self, problem: Problem, k: int) -> None:
        self.layers = [treatments(layer) for layer in problem.costs.layers]
        self.held_bytes: list[list[int]] = []
        for layer in self.layers:
            of_layer = [on_device_bytes(k, x.kept, x.swapped) for x in layer]
            self.held_bytes.append(of_layer)
        self.least_bytes = [0, *accumulate(map(min, self.held_bytes))]
        self.after = cache(self._after)

    def _after(self, layer: int, choice: int) -> list[FateChange]:
        """Lists the changes of a layer from this choice to choices that hold fewer bytes."""
        rows = self.layers[layer]
        held_bytes = self.held_bytes[layer]
        now = rows[choice]
        taken = []
        for x, bytes_now in zip(rows, held_bytes, strict=True):
            taken.append((bytes_now, x.swapped, x.extra_s, x.working))
        *options, again = taken
        choices = list(range(len(options)))
        # `RECOMPUTE` is left out if some option is no worse in held bytes, swapped bytes, working
        # bytes and seconds.
        if not any(all(map(le, option, again)) for option in options):
            choices.append(RECOMPUTE)
        changes = []
        for c in choices:
            saved_bytes = held_bytes[choice] - held_bytes[c]
            if saved_bytes > 0:
                more_bytes = rows[c].swapped - now.swapped
                more_s = rows[c].extra_s - now.extra_s
                changes.append(FateChange(layer, c, saved_bytes, more_bytes, more_s))
        return changes

    def swaps(self, layer: int, choice: int) -> list[FateChange]:
        """Lists the changes of a layer to choices that swap more than now and recompute no more.

        Args:
            layer: the number of the layer.
            choice: its present choice.
        """
        swapping = (x for x in self.after(layer, choice) if x.swapped_bytes > 0)
        return [x for x in swapping if x.extra_s <= 0]

    def recomputes(self, layer: int, choice: int) -> list[FateChange]:
        """Lists the change that saves most bytes per second, of those that swap no more than now.

        The list has one change; it is empty if every change swaps more than now.

        Args:
            layer: the number of the layer.
            choice: its present choice.
        """
        changes = [m for m in self.after(layer, choice) if m.swapped_bytes <= 0]
        if not changes:
            return []
        return [max(changes, key=lambda m: (m.per_second, m.saved_bytes))]


class Selection:
    """Stage s with layers [i, j); at first everything is kept.

    The numbers equal those of `stage_cost`, with two exceptions. The seconds that a change adds are
    the same on all devices, even if devices differ in speed. If this stage's device has less memory
    than others, the difference counts as used.
    """

    def __init__(
        self,
        segments: Segments,
        changes: FateChanges,
        s: int,
        i: int,
        j: int,
    ) -> None:
        self.problem = segments.problem
        self.changes = changes
        self.layers = range(i, j)
        self.in_flight = segments.in_flight[s]
        self.choices = [0] * (j - i)
        self._through_s = segments.compute_of(s)
        row = segments.row(s, i)
        self.fixed_bytes = int(row.fixed_bytes[0, j])
        self.traffic_s = float(row.traffic_s[0, j])
        self.comm_s = float(row.comm_s[0, j])
        now = [layer[0] for layer in changes.layers[i:j]]
        extra_s = sum(x.extra_s for x in now)
        self.compute_s = float(row.compute_s[0, j]) + extra_s
        held_bytes = changes.held_bytes[i:j]
        self.held_bytes = sum(of_layer[0] for of_layer in held_bytes)
        self.swapped_bytes = sum(x.swapped for x in now)
        self._freed_bytes = segments.given(i)[i:j].tolist()

    def later_s(self, layer: int) -> float:
        """Returns the forward and backward seconds of the stage's layers after one of them."""
        total = self._through_s
        return float(total[self.layers.stop] - total[layer + 1])

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the device holds.

        Backwards run from the last layer to the first. Each needs its working bytes, and may use
        the bytes that the backwards of later layers have freed.
        """
        peak = 0
        left = 0
        rows = zip(self.layers, self.choices, self._freed_bytes, strict=True)
        for layer, choice, freed in reversed(list(rows)):
            now = self.changes.layers[layer][choice]
            peak = max(peak, now.working - left)
            left += now.left + int(freed)
        return self.fixed_bytes + self.held_bytes + peak

    @property
    def excess_bytes(self) -> int:
        """The larger excess: of the device over its limit, or of swapped bytes over their share.

        The share of a stage's swapped bytes is the host's limit divided by the number of stages.
        """
        device = self.problem.memory_limit_bytes
        host = self.problem.host_limit_bytes
        over = [0]
        if device is not None:
            over.append(self.peak_bytes - device)
        if host is not None:
            swapped = self.in_flight * self.swapped_bytes
            over.append(swapped - host // self.problem.stages)
        return max(over)

    @property
    def is_over(self) -> bool:
        """Whether the device or the host is over its limit."""
        device = self.problem.memory_limit_bytes
        # Most often the held bytes alone are over the limit, and no walk over the layers is needed.
        if device is not None and self.fixed_bytes + self.held_bytes > device:
            return True
        return self.excess_bytes > 0

    @property
    def may_fit(self) -> bool:
        """Whether the stage could fit if every layer had the choice that holds the fewest bytes."""
        limit = self.problem.memory_limit_bytes
        if limit is None:
            return True
        before = self.changes.least_bytes
        least = before[self.layers.stop] - before[self.layers.start]
        return self.fixed_bytes + least <= limit

    def link_s(self, more_bytes: int = 0) -> float:
        """Returns the host link's seconds per micro-batch, with `more_bytes` more bytes swapped."""
        one_way_s = self.problem.host.seconds(self.swapped_bytes + more_bytes)
        return 2 * one_way_s + self.traffic_s

    @property
    def seconds(self) -> float:
        """The stage's seconds per micro-batch.

        The device, its link to the host, and its links to other stages work at the same time. The
        busiest of them counts.
        """
        return max(self.compute_s, self.link_s(), self.comm_s)

    def hides(self, change: FateChange) -> bool:
        """Tells whether the host has room, and the link to it stays no busier than the device."""
        is_hidden = self.link_s(change.swapped_bytes) <= self.compute_s
        return is_hidden and self.host_has_room(change)

    def host_has_room(self, change: FateChange) -> bool:
        """Tells whether the bytes that a change swaps fit into the stage's share of the host."""
        limit = self.problem.host_limit_bytes
        if limit is None or change.swapped_bytes <= 0:
            return True
        swapped = self.swapped_bytes + change.swapped_bytes
        return self.in_flight * swapped <= limit // self.problem.stages

    def take(self, change: FateChange) -> None:
        """Changes one layer's choice."""
        self.choices[change.layer - self.layers.start] = change.choice
        self.held_bytes -= change.saved_bytes
        self.swapped_bytes += change.swapped_bytes
        self.compute_s += change.extra_s

    def spend(
        self,
        changes: Callable[[int, int], Iterable[FateChange]],
        score: Callable[[FateChange], float],
        allowed: Callable[[FateChange], bool],
    ) -> None:
        """Takes changes, those with the best score first, until the stage fits or none is left.

        The loop ends because each taken change makes the stage hold fewer bytes, and each refused
        change is dropped.

        Args:
            changes: lists the changes of a layer from its present choice.
            score: returns how good a change is. It is called once per change, when the layer gets
                the choice from which the change starts.
            allowed: tells whether a change may be taken now.
        """

        def entries(layer: int) -> list[tuple[float, int, int, FateChange]]:
            """Returns a layer's changes from its present choice, as entries of the heap."""
            choice = self.choices[layer - self.layers.start]
            found = []
            for x in changes(layer, choice):
                entry = -float(score(x)), -x.saved_bytes, choice, x
                found.append(entry)
            return found

        heap = []
        for layer in self.layers if self.is_over else ():
            heap += entries(layer)
        heapify(heap)
        while heap and self.is_over:
            _, _, choice, change = heappop(heap)
            # A change is stale if the layer's choice has changed since.
            is_fresh = self.choices[change.layer - self.layers.start] == choice
            if is_fresh and allowed(change):
                self.take(change)
                for entry in entries(change.layer):
                    heappush(heap, entry)
