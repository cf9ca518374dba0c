"""Grows the choices of a device's layers side by side, and forgets those that are dominated.

The fates of a device's layers are chosen layer by layer. All that later layers ask of the choices
before them stands in a few numbers, a state; of two states one that is nowhere larger can be
completed at least as well, so the other is forgotten and nothing is lost. What layers to come hold
and need at least is summed beforehand (`_look_ahead`), which shows at once that a state is over the
limit.

Legend: a device has the layers of one stage or of several, one after the other; at each moment of
its order some micro-batches of each are in flight (`Lot`). A state is a column of numbers:

    EXTRA, SWAPPED    extra seconds, swapped bytes
    RUN               the run of layers computed again that it ends in: its residuals and the inputs
                      between
    BEYOND, OPEN      what the stage needs beyond what it holds: the most, over its layers, of
                      working bytes less what later layers leave of one micro-batch, if the run ends
                      here and if it goes on
    MOST              the most that an earlier stage of the device needs beyond
    HALVES, ENDS      the same as BEYOND while the first halves of backwards are on their way
                      through the stage, beyond what is held before them, and beyond what is held
                      after them; each with its OPEN
    LEFT              by how much more layers leave than they hand over to second halves
    the last rows     bytes held for all micro-batches in flight, one row for each moment

    layers         a  b  c  d  e       c and d are computed again together: a run that begins with
    state after d  [---------]         c's input. held: what a to d leave; RUN: c's residuals and
    bytes at work  [---------][==]     d's input; beyond: what one of a to d works with, where later
                                       layers have left nothing yet

Outside a run RUN and what is OPEN are infinite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.joint.choice_arrays import Flight
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN

Cell = tuple[int, int, int]
States = Float[np.ndarray, "rows _"]
EXTRA, SWAPPED, RUN, BEYOND, OPEN, MOST = range(6)
HALVES, HALVES_OPEN, ENDS, ENDS_OPEN, LEFT, EVERY = range(6, 12)
CHUNK_STATES = 128
"""States that are compared with each other at once: it bounds memory, and changes nothing that is
found.
"""
EARLIER = np.tri(CHUNK_STATES, k=-1, dtype=bool)

Step = tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]
"""For each state the one that it grew from, and its last layer's choice."""


@dataclass(frozen=True)
class Lot:
    """The layers of one device, and what of them is there at once.

    Attributes:
        cells: its stages (s, i, j) of layers [i, j), in the order of the forward.
        moments: for each stage the micro-batches in flight, and those of them between the halves of
            their backwards.
        base_bytes: what is held at each moment whatever is chosen.
        halves: whether backwards run in two.
    """

    cells: tuple[Cell, ...]
    moments: tuple[tuple[Flight, ...], ...]
    base_bytes: tuple[float, ...] = (0.0,)
    halves: bool = False

    @staticmethod
    def of_stage(in_flight: int, cell: Cell) -> "Lot":
        """Makes that of a device with one stage, whose backwards are whole."""
        flight = (in_flight, 0)
        return Lot((cell,), ((flight,),))

    @property
    def layers(self) -> list[slice]:
        """The layers of each stage."""
        return [slice(i, j) for _, i, j in self.cells]


class Growth:
    """The layers of a lot; with all choices, or those that bytes alone ask for."""

    def __init__(
        self,
        pricing: Pricing,
        lot: Lot,
        *,
        by_bytes: bool = False,
    ) -> None:
        stage = lot.cells[0][0]
        pricing = pricing.at(stage)  # all stages of a device work on the same shares
        self.table = pricing.choices
        self.lot = lot
        self.by_bytes = by_bytes
        self.extra_s = pricing.extra_s(stage)
        sizes = [j - i for _, i, j in lot.cells]
        ends = np.cumsum(sizes)
        self.n = int(ends[-1])
        self.lasts = set((ends - 1).tolist())
        self.ends = np.append(np.repeat(ends, sizes), self.n)  # of the stage of each layer
        # Rows that are the same for all states would only make comparisons longer.
        self.fixed_rows = EVERY if lot.halves else MOST + (len(sizes) > 1)
        self.at = np.concatenate([np.arange(i, j) for _, i, j in lot.cells])
        given = [pricing.segments.given(layers.start)[layers] for layers in lot.layers]
        self.given = np.concatenate(given)
        self.held = np.stack([self._held_bytes(moment) for moment in lot.moments])
        self.columns = self._columns(by_bytes)
        self._look_ahead()

    def _held_bytes(self, moment: Sequence[Flight]) -> np.ndarray:
        """Counts what each choice of each layer holds, with so much of each stage in flight."""
        stages = zip(moment, self.lot.layers, strict=True)
        return np.concatenate([self.table.held_bytes(flight, layers) for flight, layers in stages])

    def _columns(self, by_bytes: bool) -> list[np.ndarray]:
        """Lists the choices of each layer that are looked at."""
        table = self.table
        if not by_bytes:
            return [np.flatnonzero(allowed) for allowed in table.allowed[self.at]]
        columns = []
        for stage, layers in enumerate(self.lot.layers):
            flights = tuple(moment[stage] for moment in self.lot.moments)
            columns += table.min_bytes_columns(flights)[layers]
        return columns

    def _look_ahead(self) -> None:
        """Bounds what the layers to come hold and need, from each one on, at each moment."""
        table = self.table
        allowed = table.allowed[self.at]
        left = table.left_bytes[self.at]
        working = table.working_bytes[self.at]

        def least_of(sizes: np.ndarray) -> np.ndarray:
            return np.where(allowed, sizes, np.inf).min(-1)

        least = least_of(self.held)  # of what a layer holds
        spare = least_of(self.held - left)  # and less what it leaves of the micro-batch at work
        top = least_of(self.held + working)
        self.least_to_come = to_come(least)
        self.spare_to_come = self.until_end(spare - self.given, least)
        behind = self.until_end(spare - self.given, least, 1)
        if self.lot.halves:
            fall = least_of(table.handed_bytes[self.at] - left)
            nothing = np.zeros(self.n)
            self.fall_to_come = self.until_end(fall - self.given, nothing)
        # While a layer works, those before it hold, those behind it hold and leave nothing of this
        # micro-batch: the most of that from each layer on, over what all of them hold at least.
        least_from = self.least_to_come[:, :-1]
        over = top + behind[:, :-1] - least_from
        most_over = np.maximum.accumulate(over[:, ::-1], axis=1)[:, ::-1]
        largest = most_over + least_from
        behind_all = np.full((len(largest), 1), -np.inf)
        self.most_to_come = np.append(largest, behind_all, axis=1)

    def until_end(
        self,
        inside: np.ndarray,
        after: np.ndarray,
        skipped: int = 0,
    ) -> np.ndarray:
        """Sums from each layer on: over its stage one number per layer, over later stages another.

        Args:
            inside: what counts in the stage of the layer that is begun with.
            after: what counts in later stages.
            skipped: layers of the stage that are left out, from the first on.
        """
        begin = np.minimum(np.arange(self.n + 1) + skipped, self.n)
        inner = to_come(inside)
        outer = to_come(after)
        own_stage = inner[..., begin] - inner[..., self.ends]
        return own_stage + outer[..., self.ends]

    def begin(self) -> States:
        """Returns the state of no layers: a single column."""
        fixed = np.zeros(EVERY)
        fixed[[RUN, OPEN, HALVES_OPEN, ENDS_OPEN]] = np.inf
        fixed[[HALVES, ENDS]] = -np.inf
        state = np.concatenate([fixed[: self.fixed_rows], self.lot.base_bytes])
        return state[:, None]

    def grown(self, states: States, at: int) -> States:
        """Grows every state by every choice of the `at`-th layer.

        A choice that continues a run where there is none is taken to hold infinitely much, so that
        it is never kept.

        Args:
            states: of the layers before.
            at: the place of the layer among those of the lot.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        swapped_bytes = table.swapped_bytes[layer, columns]
        grown = np.empty((len(states), states.shape[1], len(columns)))
        grown[EXTRA] = states[EXTRA][:, None] + self.extra_s[layer, columns]
        grown[SWAPPED] = states[SWAPPED][:, None] + swapped_bytes
        # Both ways to compute again are the last columns of every layer, as its last choices.
        run = np.full(grown.shape[1:], np.inf)  # the bytes of a run while this layer works
        run[:, RECOMPUTE] = 0.0
        run[:, RECOMPUTE_CHAIN] = states[RUN] + table.input_bytes[layer]
        ends_stage = at in self.lasts  # and with it the last run
        grown[RUN] = np.inf if ends_stage else run + table.residual_bytes[layer]
        self._grow_beyond(states, grown, run, at)
        # A run that goes on where none is has infinite bytes at work, however it may end.
        held_before = states[self.fixed_rows :][:, :, None]
        held_bytes = held_before + self.held[:, None, at, columns]
        is_possible = np.isfinite(beyond_held(grown))
        grown[self.fixed_rows :] = np.where(is_possible, held_bytes, np.inf)
        if self.fixed_rows > MOST:
            grown[MOST] = states[MOST][:, None]
            if ends_stage:
                self._end_stage(grown)
        if self.by_bytes:
            grown[[EXTRA, SWAPPED]] = 0.0
        return grown.reshape(len(states), -1)

    def _grow_beyond(
        self,
        states: States,
        grown: np.ndarray,
        run: np.ndarray,
        at: int,
    ) -> None:
        """Counts what a stage with one layer more needs beyond what it holds, in `grown`.

        While an earlier layer works, what the new one leaves is gone: so much less is needed
        beyond. While the new one works nothing of later layers is there. The larger of both counts.

        Args:
            states: of the layers before.
            grown: those with the layer, whose `RUN` is counted already.
            run: the bytes of a run while the layer works, for each state and choice.
            at: the place of the layer among those of the lot.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        temporary = table.temporary_bytes[layer]
        again = [RECOMPUTE, RECOMPUTE_CHAIN]
        working = np.broadcast_to(table.working_bytes[layer, columns], run.shape).copy()
        working[:, again] = run[:, again] + table.recompute_peak_bytes[layer] + temporary
        working_on = grown[RUN] + temporary  # if the run goes on behind this layer
        left = table.left_bytes[layer, columns] + self.given[at]

        def grow(
            closed: int,
            opened: int,
            less: np.ndarray | float,
            beside: np.ndarray | float,
        ) -> None:
            # closed: if the run ends here. opened: if it goes on, so that a choice that continues a
            # run grows out of `opened`, every other one out of `closed`.
            before = np.repeat(
                states[closed][:, None],
                len(columns),
                axis=1,
            )
            before[:, RECOMPUTE_CHAIN] = states[opened]
            before -= less
            grown[closed] = np.maximum(before, working + beside)
            grown[opened] = np.maximum(before, working_on + beside)

        grow(BEYOND, OPEN, less=left, beside=0.0)
        if self.lot.halves:
            more = left - table.handed_bytes[layer, columns]
            grown[LEFT] = states[LEFT][:, None] + more
            grow(HALVES, HALVES_OPEN, less=more, beside=0.0)
            grow(ENDS, ENDS_OPEN, less=0.0, beside=grown[LEFT])

    def _end_stage(self, states: np.ndarray) -> None:
        """Ends a stage with these states: records what it needs beyond, and begins the next one."""
        needed = states[BEYOND]
        # What halves need is counted over the bytes before the first halves or after them: over
        # whichever is more, so the need beyond is the smaller of the two.
        if self.lot.halves:
            halves = np.minimum(states[HALVES], states[ENDS])
            needed = np.maximum(needed, halves)
            states[[HALVES, ENDS]] = -np.inf
            states[[HALVES_OPEN, ENDS_OPEN]] = np.inf
            states[LEFT] = 0.0
        states[MOST] = np.maximum(states[MOST], needed)
        states[BEYOND] = 0.0
        states[OPEN] = np.inf

    def least_bytes(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """Bounds what states take, held and beyond, whatever the layers to come choose.

        Once no layer is to come, the bound is what they take.

        Args:
            states: of the first layers.
            done: how many layers these are.
        """
        # The most is needed by a layer of this stage so far, by one to come, or in a stage before.
        so_far = beyond_held(states) + self.spare_to_come[:, done, None]
        beyond = np.maximum(so_far, self.most_to_come[:, done, None])
        if self.fixed_rows > MOST:
            largest = states[MOST]
            if self.lot.halves:
                largest = np.maximum(largest, self._beyond_halves(states, done))
            beyond = np.maximum(beyond, largest + self.least_to_come[:, done, None])
        held = states[self.fixed_rows :]
        return np.asarray((held + beyond).max(0))

    def _beyond_halves(self, states: States, done: int) -> Float[np.ndarray, "M"]:
        """Bounds what first halves need beyond on their way through the stage."""
        fall = self.fall_to_come[done]
        closed = np.minimum(states[HALVES] + fall, states[ENDS])
        opened = np.minimum(states[HALVES_OPEN] + fall, states[ENDS_OPEN])
        return np.minimum(closed, opened)

    def step(self, kept: Int[np.ndarray, "M"], at: int) -> Step:
        """Finds the origins of the states kept of those that have grown by a layer."""
        columns = self.columns[at]
        parents, last = np.divmod(kept, len(columns))
        return parents, columns[last]

    def path(self, steps: Sequence[Step], at: int) -> tuple[int, ...]:
        """Gives the choices of a state."""
        choices = []
        for parents, columns in reversed(steps):
            choices.append(self.table.choice(int(columns[at])))
            at = int(parents[at])
        return tuple(reversed(choices))


@dataclass(frozen=True)
class Followed:
    """The choices of all layers that are left at the end; what was left out on the way takes
    `dropped` or more.
    """

    states: States
    steps: Sequence[Step]
    dropped: float


def follow(
    growth: Growth,
    below: float,
    width: int,
    bounds: Callable[[States, int], Float[np.ndarray, "M"]],
    fittest: Callable[[States, np.ndarray, np.ndarray, int], np.ndarray],
) -> Followed:
    """Follows choices layer by layer; of many only some go on.

    States that cannot end below a number go out, and so do those that others dominate: neither can
    be the best. Where more than twice the width are left, the fittest go on, and the search may
    miss the best; `dropped` says by how much.

    Args:
        growth: the layers.
        below: what an answer has to be below.
        width: how many states there may be; it is exact as long as there are no more than twice as
            many.
        bounds: of what states of so many layers lead to at least.
        fittest: the places of those that are to go on, of states with their bounds and the places
            still alive.
    """
    states = growth.begin()
    steps = list[Step]()
    dropped = np.inf
    for at in range(growth.n):
        states = growth.grown(states, at)
        bound = bounds(states, at + 1)
        alive = np.flatnonzero(bound < below)
        if len(alive) > 2 * width:
            chosen = np.intersect1d(alive, fittest(states, bound, alive, at + 1))
            left = np.setdiff1d(alive, chosen, assume_unique=True)
            least = float(bound[left].min(initial=np.inf))
            dropped = min(dropped, least)
            alive = chosen
        undominated = front(states[:, alive])
        alive = alive[undominated]
        states = states[:, alive]
        if not len(alive):
            break
        steps.append(growth.step(alive, at))
    return Followed(states, steps, dropped)


def beyond_held(states: np.ndarray) -> np.ndarray:
    """Counts what states need at least beyond what they hold, whether their runs end or go on."""
    return np.minimum(states[BEYOND], states[OPEN])


def to_come(per_layer: np.ndarray) -> np.ndarray:
    """Sums over the last layers, from each on; the layers are the last axis."""
    backwards = per_layer[..., ::-1]
    total = np.zeros((*per_layer.shape[:-1], per_layer.shape[-1] + 1))
    total[..., :-1] = np.cumsum(backwards, axis=-1)[..., ::-1]
    return total


def front(states: States) -> Int[np.ndarray, "_"]:
    """Finds the places of the states that no other dominates; of equals, the first."""
    if states.shape[1] <= 1:
        return np.arange(states.shape[1])
    # By extra seconds first, and so on: a state is dominated by earlier ones only.
    order = np.lexsort(states[::-1])
    best = np.empty(0, dtype=np.int64)
    for begin in range(0, len(order), CHUNK_STATES):
        # Those kept so far dominate all that they can: what one that is out dominates, its own
        # dominator does too. Inside a chunk earlier states alone are looked at, for the same
        # reason.
        chunk = order[begin : begin + CHUNK_STATES]
        if len(best):
            by_best = _below(states[:, chunk], states[:, best])
            chunk = chunk[~by_best.any(1)]
        inside = _below(states[:, chunk], states[:, chunk])
        earlier = EARLIER[: len(chunk), : len(chunk)]
        is_dominated = (inside & earlier).any(1)
        best = np.concatenate([best, chunk[~is_dominated]])
    return np.sort(best)


def _below(states: States, by: States) -> np.ndarray:
    """Tells for each state a and state b of `by` whether b is nowhere larger than a, as [a, b]."""
    below = by[0] <= states[0][:, None]
    for number in range(1, len(states)):
        below &= by[number] <= states[number][:, None]
    return below
