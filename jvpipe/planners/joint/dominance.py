"""Grows the choices of a device's layers side by side, and drops those that are dominated.

The fates of a device's layers are chosen layer by layer, in forward order. Only a few numbers about
the earlier choices matter to the later layers. These numbers are called a state. State A dominates
state B if A is at most as large as B in every number. Any later choices that complete B also
complete A, with at most as many seconds and bytes. So dropping B loses nothing.

Lower bounds on what the remaining layers hold and need are summed beforehand (`look_ahead.py`).
These sums show early that a state must end over the limit.

Legend: a device has the layers of one stage or of several, one stage after the other. At each
moment of the device's order of tasks, each stage has some micro-batches in flight (`Lot`). A layer
leaves bytes of a micro-batch between its forward and its backward, and needs working bytes while it
runs. The bytes that a stage holds are the sum of what all its layers leave. For one
micro-batch on a stage of layers a to d:

    held          [-- a --][-- b --][-- c --][-- d --]
    while b runs  [-- a --][-- b --][===== working =====]
                                                      [-]  beyond

While b runs, c and d hold nothing: they have left nothing yet, or what they left is free
again. Beyond what the stage holds, b therefore needs its working bytes less what c and d
leave. The need of a stage is the largest of these differences among its layers.

A run is a sequence of layers whose forwards run again together, from the first layer's input, which
is kept. A state ends in a run if its last layer belongs to a run. The next layer may continue the
run. A state is a column of numbers, one for each of these rows:

    EXTRA         the seconds that the choices add to backwards
    SWAPPED       the bytes that are swapped per micro-batch
    RUN           the working bytes of the run that the state ends in: the residuals of the run's
                  layers, and the inputs of all but the first
    BEYOND        the need of the stage if the next layer does not continue a run
    OPEN          the need of the stage if the next layer continues the run
    MOST          the largest need of the device's earlier stages
    HALVES        like BEYOND, but while the first half of a backward goes through the stage: later
                  layers then hold what they hand over to second halves. This need is counted
                  beyond what the stage holds before the first half
    HALVES_OPEN   like HALVES, if the next layer continues the run
    ENDS          like HALVES, but counted beyond what the stage holds after the first half
    ENDS_OPEN     like ENDS, if the next layer continues the run
    LEFT          by how much the bytes that the stage's layers leave exceed those that they hand
                  over
    other rows    for each moment, the bytes held for all micro-batches in flight

If a state does not end in a run, RUN and the rows ending in OPEN are infinite, so that no choice
can continue a run. The order of the rows matters, because the rows from MOST or from HALVES on are
left out if no state needs them (`fixed_rows`).
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.joint.choice_arrays import Columns
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.look_ahead import look_ahead
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN

States = Float[np.ndarray, "rows _"]
EXTRA, SWAPPED, RUN, BEYOND, OPEN, MOST = range(6)
HALVES, HALVES_OPEN, ENDS, ENDS_OPEN, LEFT, EVERY = range(6, 12)
BEGIN = np.zeros(EVERY)
"""The rows of a state in which no layer has a choice yet, up to those of the moments."""
BEGIN[[RUN, OPEN, HALVES_OPEN, ENDS_OPEN]] = np.inf
BEGIN[[HALVES, ENDS]] = -np.inf
PerState = Float[np.ndarray, "M"]
Places = Int[np.ndarray, "_"]
"""The indices of some states."""
Chosen = Int[np.ndarray, "_ layers"]
"""For each state, the choices of the layers so far."""
CHUNK_STATES = 128
"""How many states are compared with each other at once. It bounds memory and changes no result."""


class Growth:
    """The growth of states over the layers of a lot, one layer after the other.

    Layers are numbered from 0 over the whole lot.

    Attributes:
        n: the number of layers of the lot.
        at: for each layer of the lot, its number in the model.
        ends: for each layer, the number of layers up to the end of its stage.
        columns: for each layer, the choices that are tried; they index the columns of `Choices`.
        held: the bytes that each choice holds, by moment, layer and column.
        given: for each layer, bytes that are held from that layer on for values that several layers
            read.
        fixed_rows: how many rows of a state come before the rows of the moments.
        ahead: lower bounds of what the remaining layers hold and need.
    """

    def __init__(
        self,
        pricing: Pricing,
        lot: Lot,
        *,
        by_bytes: bool = False,
    ) -> None:
        """Prepares the growth.

        Args:
            pricing: the choices of all layers.
            lot: the layers of a device.
            by_bytes: whether only the bytes on the device count. EXTRA and SWAPPED are then 0 in
                all states, and choices that cannot lead to the fewest bytes are not tried.
        """
        stage = lot.cells[0][0]
        # All stages of a device work on equal shares of micro-batches.
        pricing = pricing.at(stage)
        self.table = table = pricing.choices
        self.lot = lot
        # If only bytes count, states must not differ in other numbers. So the other numbers are 0.
        counted = 0.0 if by_bytes else 1.0
        self.extra_s = counted * pricing.extra_s(stage)
        self.swapped_bytes = counted * table.swapped_bytes
        sizes = [j - i for _, i, j in lot.cells]
        ends = np.cumsum(sizes)
        self.n = int(ends[-1])
        self.ends = np.append(np.repeat(ends, sizes), self.n)
        # Rows that would be the same for all states are left out, to make comparisons faster: MOST
        # and later rows if the device has one stage, HALVES and later rows if backwards are whole.
        self.fixed_rows = EVERY if lot.halves else MOST + (len(sizes) > 1)
        self.at = np.concatenate([np.arange(i, j) for _, i, j in lot.cells])
        self.columns = list[Columns]()
        given = []
        held_bytes = []
        for (_, i, j), flights in zip(lot.cells, zip(*lot.moments, strict=True), strict=True):
            columns = table.min_bytes_columns(flights) if by_bytes else table.every
            self.columns += columns[i:j]
            given.append(pricing.segments.given(i)[i:j])
            held_bytes.append([table.held_bytes(flight, slice(i, j)) for flight in flights])
        self.given = np.concatenate(given)
        self.held = np.concatenate(held_bytes, axis=1)
        self.ahead = look_ahead(
            table,
            self.at,
            self.held,
            self.given,
            self.ends,
        )

    def begin(self) -> States:
        """Returns the one state in which no layer has a choice yet."""
        state = np.concatenate([BEGIN[: self.fixed_rows], self.lot.base_bytes])
        return state[:, None]

    def grown(self, states: States, at: int) -> States:
        """Grows every state by every choice of a layer.

        A choice that continues a run is impossible if the state does not end in a run. The state
        that it would make gets infinite bytes, so that it is never kept.

        Args:
            states: of the layers before.
            at: the layer.

        Returns:
            For each state in turn, one new state for each of the layer's columns.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        grown = np.empty((len(states), states.shape[1], len(columns)))
        before = states[:, :, None]
        grown[EXTRA] = before[EXTRA] + self.extra_s[layer, columns]
        grown[SWAPPED] = before[SWAPPED] + self.swapped_bytes[layer, columns]
        # RECOMPUTE and RECOMPUTE_CHAIN are -1 and -2, and so index the last two columns.
        run = np.full(grown.shape[1:], np.inf)  # bytes of the run while this layer runs
        run[:, RECOMPUTE] = 0.0
        run[:, RECOMPUTE_CHAIN] = states[RUN] + table.input_bytes[layer]
        ends_stage = at + 1 == self.ends[at]  # the end of a stage also ends a run
        grown[RUN] = np.inf if ends_stage else run + table.residual_bytes[layer]
        self._grow_beyond(states, grown, run, at)
        # A state that continues a run where there is none has infinite BEYOND and OPEN.
        held_bytes = before[self.fixed_rows :] + self.held[:, None, at, columns]
        is_possible = np.isfinite(beyond_held(grown))
        grown[self.fixed_rows :] = np.where(is_possible, held_bytes, np.inf)
        if self.fixed_rows > MOST:
            grown[MOST] = before[MOST]
            if ends_stage:
                self._end_stage(grown)
        return grown.reshape(len(states), -1)

    def _grow_beyond(
        self,
        states: States,
        grown: np.ndarray,
        run: np.ndarray,
        at: int,
    ) -> None:
        """Writes into `grown` the need of the stage with one more layer.

        While an earlier layer runs, the bytes that the new layer leaves are free. So the need of
        the earlier layers becomes less by these bytes. The new layer itself needs its working
        bytes. The larger of the two needs counts.

        Args:
            states: of the layers before.
            grown: states with the new layer; their `RUN` must be written already.
            run: for each state and choice, the bytes of the run while the new layer runs.
            at: the new layer.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        temporary = table.temporary_bytes[layer]
        working = run + table.recompute_peak_bytes[layer] + temporary
        options = columns[:RECOMPUTE_CHAIN]  # all but the two choices of runs
        working[:, :RECOMPUTE_CHAIN] = table.working_bytes[layer, options]
        working_on = grown[RUN] + temporary  # if the next layer continues the run
        left = table.left_bytes[layer, columns] + self.given[at]

        def grow(
            closed: int,
            opened: int,
            less: np.ndarray | float,
            beside: np.ndarray | float,
        ) -> None:
            """Writes two rows of `grown`.

            Args:
                closed: BEYOND or a row like it, from which choices that continue no run grow.
                opened: the matching OPEN row, from which choices that continue a run grow.
                less: the bytes by which the earlier layers need less, by choice.
                beside: the bytes held beside the working bytes while the new layer runs.
            """
            before = np.repeat(states[closed][:, None], len(columns), axis=1)
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
        """Ends a stage: records its need in MOST, and resets the other rows for the next stage."""
        needed = states[BEYOND]
        # The peak of a first half is counted in two ways: as HALVES beyond the bytes held before
        # it, and as ENDS beyond the bytes held after it. The moments include both. Beyond the
        # larger of these held bytes, the stage needs the smaller of HALVES and ENDS.
        if self.lot.halves:
            halves = np.minimum(states[HALVES], states[ENDS])
            needed = np.maximum(needed, halves)
        states[MOST] = np.maximum(states[MOST], needed)
        of_stage = [BEYOND, OPEN, *range(HALVES, self.fixed_rows)]
        states[of_stage] = BEGIN[of_stage, None, None]

    def least_bytes(self, states: States, done: int) -> PerState:
        """Bounds from below the peak bytes of each state, whatever the later layers choose.

        The bound is exact if no layer remains.

        Args:
            states: of the first layers.
            done: the number of these layers.
        """
        # The peak is at a layer of the present stage so far, at a remaining layer, or at a layer of
        # an earlier stage.
        ahead = self.ahead
        so_far = beyond_held(states) + ahead.spare_bytes[:, done, None]
        beyond = np.maximum(so_far, ahead.top_bytes[:, done, None])
        if self.fixed_rows > MOST:
            largest = states[MOST]
            if self.lot.halves:
                # The present stage, while first halves go through it.
                halves = states[[HALVES, HALVES_OPEN]] + ahead.fall_bytes[done]
                needed = np.minimum(halves, states[[ENDS, ENDS_OPEN]])
                largest = np.maximum(largest, needed.min(0))
            of_earlier = largest + ahead.least_bytes[:, done, None]
            beyond = np.maximum(beyond, of_earlier)
        held = states[self.fixed_rows :]
        return np.asarray((held + beyond).max(0))

    def chosen(self, before: Chosen, kept: Places, at: int) -> Chosen:
        """Returns the choices that led to grown states.

        Args:
            before: the choices that led to the states of the layers before.
            kept: the indices of the states that stay, among all states that `grown` made.
            at: the layer.
        """
        columns = self.columns[at]
        parents, last = np.divmod(kept, len(columns))
        return np.c_[before[parents], columns[last]]


def follow(
    growth: Growth,
    below: float,
    width: int,
    bounds: Callable[[States, int], PerState],
    fittest: Callable[[States, PerState, Places, int], Places],
) -> tuple[States, Chosen, float]:
    """Grows states layer by layer, and drops those that cannot be the best.

    A state is dropped if its bound is not less than `below`, or if another state dominates it. If
    bounds leave more than twice `width` states, only the fittest of these are kept. The search may
    then miss the best.

    Args:
        growth: of the layers.
        below: only answers that are less than this are searched for.
        width: if there are more than twice this many states, only the fittest are kept.
        bounds: called with states and the number of their layers. It returns for each state a lower
            bound on any answer that the state leads to.
        fittest: called with states, their bounds, the indices of those whose bound is less than
            `below`, and the number of layers. It returns the indices of the states to keep.

    Returns:
        The states that are left once every layer has a choice, none of which dominates another; the
        choices that led to each of them; and a lower bound on the answers that were missed because
        there were too many states, infinite if no state was dropped for this reason.
    """
    states = growth.begin()
    chosen = np.empty((1, 0), dtype=int)
    dropped = np.inf
    for at in range(growth.n):
        states = growth.grown(states, at)
        bound = bounds(states, at + 1)
        alive = np.flatnonzero(bound < below)
        if len(alive) > 2 * width:
            stay = np.intersect1d(alive, fittest(states, bound, alive, at + 1))
            left = np.setdiff1d(alive, stay, assume_unique=True)
            dropped = float(bound[left].min(initial=dropped))
            alive = stay
        alive = alive[front(states[:, alive])]
        states = states[:, alive]
        chosen = growth.chosen(chosen, alive, at)
        if not len(alive):
            break
    return states, chosen, dropped


def beyond_held(states: np.ndarray) -> np.ndarray:
    """Returns the need of each state's present stage: the lesser of BEYOND and OPEN."""
    return np.minimum(states[BEYOND], states[OPEN])


def front(states: States) -> Places:
    """Returns the indices of the states that no other dominates, and of the first of equal ones."""
    if states.shape[1] <= 1:
        return np.arange(states.shape[1])
    # In lexicographic order, only earlier states can dominate a state.
    order = np.lexsort(states[::-1])
    best = np.empty(0, dtype=np.int64)
    for begin in range(0, len(order), CHUNK_STATES):
        # A state of a later chunk is compared only with states that were kept. This is enough,
        # because whatever a dropped state dominates, its dominator dominates too. Within a chunk,
        # a state is compared with all earlier ones, dropped or not, which gives the same result.
        chunk = order[begin : begin + CHUNK_STATES]
        if len(best):
            by_best = _below(states[:, chunk], states[:, best])
            chunk = chunk[~by_best.any(1)]
        present = states[:, chunk]
        earlier = np.tri(len(chunk), k=-1, dtype=bool)
        is_dominated = (_below(present, present) & earlier).any(1)
        best = np.concatenate([best, chunk[~is_dominated]])
    return np.sort(best)


def _below(states: States, by: States) -> np.ndarray:
    """Returns an array [a, b] of booleans: whether state b of `by` is nowhere above state a."""
    return np.logical_and.reduce(by[:, None] <= states[:, :, None])
