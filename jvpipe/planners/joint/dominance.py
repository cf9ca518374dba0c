"""Grows the choices of a device's layers side by side, and drops those that are dominated.

The fates of a device's layers are chosen layer by layer. Later layers depend on earlier choices
only through a few numbers, called a state. A state is dominated if another state is at most as
large in every number. The other state can be completed by the same later choices, and is then at
least as good, so that dropping the dominated state loses nothing. What the layers to come hold and
need at least is summed beforehand (`_look_ahead`). These sums show early that a state must end over
the limit.

Legend: a device has the layers of one stage or of several, one stage after the other. At each
moment of the device's order, some micro-batches of each stage are in flight (`Lot`). A run is a
sequence of layers whose forwards run again together, from the first layer's input, which is kept. A
state is a column of numbers, one for each of these rows:

    EXTRA, SWAPPED    extra seconds; swapped bytes
    RUN               the bytes of the run that the state ends in: the residuals of its layers and
                      the inputs between them
    BEYOND, OPEN      what the stage needs beyond what it holds: the most, over its layers, of the
                      layer's working bytes less what later layers leave of one micro-batch. BEYOND
                      if the run ends with the last layer, OPEN if the run goes on
    MOST              the largest such need of the device's earlier stages
    HALVES, ENDS      needs like BEYOND while the first half of a backward goes through the stage:
                      HALVES is the need beyond what the stage holds before the first half, ENDS
                      beyond what it holds after. HALVES_OPEN and ENDS_OPEN are for runs that go on
    LEFT              by how many bytes layers leave more than they hand over to second halves
    the last rows     bytes held for all micro-batches in flight, one row for each moment

An example, with the bytes of a stage drawn from left to right:

    layers         a  b  c  d  e       c and d are a run that begins with c's input
    held           [---------]         what layers a to d leave
    at work        [---------][==]     beyond (==): what one of a to d works with while later layers
                                       have left nothing; RUN is c's residuals and d's input

Outside a run, RUN and the OPEN rows are infinite, so that no choice can continue a run. The order
of the rows matters: `fixed_rows` leaves out rows that are not needed from MOST or HALVES on.
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
"""How many states are compared with each other at once; it bounds memory, and changes no result."""
EARLIER = np.tri(CHUNK_STATES, k=-1, dtype=bool)

Step = tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]
"""For each state, the index of the state that it grew from, and the choice of the last layer."""


@dataclass(frozen=True)
class Lot:
    """The layers of one device, and the micro-batches of which it holds something at once.

    Attributes:
        cells: the device's stages as (s, i, j), stage s of layers [i, j), in forward order.
        moments: at each moment, for each stage, the micro-batches in flight and those between the
            halves of their backward.
        base_bytes: for each moment, bytes that are held whatever is chosen.
        halves: whether backwards run in two halves.
    """

    cells: tuple[Cell, ...]
    moments: tuple[tuple[Flight, ...], ...]
    base_bytes: tuple[float, ...] = (0.0,)
    halves: bool = False

    @staticmethod
    def of_stage(in_flight: int, cell: Cell) -> "Lot":
        """Makes the lot of a device with one stage, whose backwards are whole."""
        flight = (in_flight, 0)
        return Lot((cell,), ((flight,),))

    @property
    def layers(self) -> list[slice]:
        """The layers of each stage."""
        return [slice(i, j) for _, i, j in self.cells]


class Growth:
    """The growth of states over the layers of a lot.

    With `by_bytes`, seconds do not count, and only choices that may hold the fewest bytes are used.
    """

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
        # Rows that would be the same for all states are left out, to make comparisons faster.
        self.fixed_rows = EVERY if lot.halves else MOST + (len(sizes) > 1)
        self.at = np.concatenate([np.arange(i, j) for _, i, j in lot.cells])
        given = [pricing.segments.given(layers.start)[layers] for layers in lot.layers]
        self.given = np.concatenate(given)
        self.held = np.stack([self._held_bytes(moment) for moment in lot.moments])
        self.columns = self._columns(by_bytes)
        self._look_ahead()

    def _held_bytes(self, moment: Sequence[Flight]) -> np.ndarray:
        """Counts the bytes that each choice of each layer holds at a moment."""
        stages = zip(moment, self.lot.layers, strict=True)
        return np.concatenate([self.table.held_bytes(flight, layers) for flight, layers in stages])

    def _columns(self, by_bytes: bool) -> list[np.ndarray]:
        """Lists for each layer the choices that are tried."""
        table = self.table
        if not by_bytes:
            return [np.flatnonzero(allowed) for allowed in table.allowed[self.at]]
        columns = []
        for stage, layers in enumerate(self.lot.layers):
            flights = tuple(moment[stage] for moment in self.lot.moments)
            columns += table.min_bytes_columns(flights)[layers]
        return columns

    def _look_ahead(self) -> None:
        """Bounds from below what the layers from each one on hold and need, at each moment."""
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
        # While a layer works, layers before it hold all that they leave. Layers after it hold what
        # other micro-batches leave, but nothing of this one. `over` is such a layer's need above
        # the least that all layers to come hold; the largest from each layer on is taken.
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
        """Sums from each layer on: `inside` up to the end of its stage, `after` from there on.

        Args:
            inside: numbers of layers that count in the stage of the first layer of the sum.
            after: numbers of layers that count in later stages.
            skipped: how many layers to leave out at the beginning of each sum.
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

        A choice that continues a run is impossible if the state does not end in one. It is given
        infinite bytes, so that it is never kept.

        Args:
            states: of the layers before.
            at: the index of the layer among those of the lot.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        swapped_bytes = table.swapped_bytes[layer, columns]
        grown = np.empty((len(states), states.shape[1], len(columns)))
        grown[EXTRA] = states[EXTRA][:, None] + self.extra_s[layer, columns]
        grown[SWAPPED] = states[SWAPPED][:, None] + swapped_bytes
        # The two choices that recompute are -1 and -2, and the last two columns of every layer.
        run = np.full(grown.shape[1:], np.inf)  # bytes of the run while this layer works
        run[:, RECOMPUTE] = 0.0
        run[:, RECOMPUTE_CHAIN] = states[RUN] + table.input_bytes[layer]
        ends_stage = at in self.lasts  # the end of a stage also ends a run
        grown[RUN] = np.inf if ends_stage else run + table.residual_bytes[layer]
        self._grow_beyond(states, grown, run, at)
        # A run that continues where none began has infinite BEYOND and OPEN.
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
        """Writes into `grown` what a stage with one more layer needs beyond what it holds.

        While an earlier layer works, the bytes that the new layer leaves are free, so that the
        earlier layers need less beyond. While the new layer works, later layers have left nothing.
        The larger need of the two cases counts.

        Args:
            states: of the layers before.
            grown: states with the new layer, in which `RUN` is written already.
            run: the bytes of a run while the layer works, for each state and choice.
            at: the index of the layer among those of the lot.
        """
        table = self.table
        layer = self.at[at]
        columns = self.columns[at]
        temporary = table.temporary_bytes[layer]
        again = [RECOMPUTE, RECOMPUTE_CHAIN]
        working = np.broadcast_to(table.working_bytes[layer, columns], run.shape).copy()
        working[:, again] = run[:, again] + table.recompute_peak_bytes[layer] + temporary
        working_on = grown[RUN] + temporary  # if the run goes on after this layer
        left = table.left_bytes[layer, columns] + self.given[at]

        def grow(
            closed: int,
            opened: int,
            less: np.ndarray | float,
            beside: np.ndarray | float,
        ) -> None:
            # Row `closed` is for a run that ends here, row `opened` for one that goes on. So a
            # choice that continues a run grows out of `opened`, every other choice out of `closed`.
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
        """Ends a stage in these states: records its need in MOST, and resets rows for the next."""
        needed = states[BEYOND]
        # The schedule's moments count the bytes held before the first half of a backward, and those
        # held after. The need beyond the larger of these two is the smaller of HALVES and ENDS.
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
        """Bounds from below the peak bytes that states lead to, whatever later layers choose.

        If no layer is to come, the bound is exact.

        Args:
            states: of the first layers.
            done: the number of these layers.
        """
        # The largest need is that of a layer of this stage so far, of a layer to come, or of an
        # earlier stage.
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
        """Bounds from below what first halves need beyond as they go through the stage."""
        fall = self.fall_to_come[done]
        closed = np.minimum(states[HALVES] + fall, states[ENDS])
        opened = np.minimum(states[HALVES_OPEN] + fall, states[ENDS_OPEN])
        return np.minimum(closed, opened)

    def step(self, kept: Int[np.ndarray, "M"], at: int) -> Step:
        """Finds the origins and last choices of the states that are kept once grown by a layer."""
        columns = self.columns[at]
        parents, last = np.divmod(kept, len(columns))
        return parents, columns[last]

    def path(self, steps: Sequence[Step], at: int) -> tuple[int, ...]:
        """Returns the choices of all layers that led to the state at index `at`."""
        choices = []
        for parents, columns in reversed(steps):
            choices.append(self.table.choice(int(columns[at])))
            at = int(parents[at])
        return tuple(reversed(choices))


@dataclass(frozen=True)
class Followed:
    """The states of all layers that are left at the end, and how they grew.

    States that were left out because there were too many have bounds of `dropped` or more.
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
    """Grows states layer by layer, and drops those that cannot be the best.

    A state is dropped if its bound is not below `below`, or if another state dominates it. If more
    than twice the width are left, only the fittest stay. Then the search may miss the best, and
    `Followed.dropped` is a lower bound on what was left out.

    Args:
        growth: of the layers.
        below: the number that an answer has to be below.
        width: the number of states to keep. The search is exact as long as no more than twice as
            many are left.
        bounds: returns lower bounds on what states lead to, given states and their layers' number.
        fittest: returns the indices of the states that stay, given states, their bounds, the
            indices of those that may be below, and their layers' number.
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
    """Returns what states need at least beyond what they hold, the lesser of BEYOND and OPEN."""
    return np.minimum(states[BEYOND], states[OPEN])


def to_come(per_layer: np.ndarray) -> np.ndarray:
    """Makes suffix sums: from each layer to the last, along the last axis, which is the layers'."""
    backwards = per_layer[..., ::-1]
    total = np.zeros((*per_layer.shape[:-1], per_layer.shape[-1] + 1))
    total[..., :-1] = np.cumsum(backwards, axis=-1)[..., ::-1]
    return total


def front(states: States) -> Int[np.ndarray, "_"]:
    """Returns the indices of the states that no other dominates; of equal states, of the first."""
    if states.shape[1] <= 1:
        return np.arange(states.shape[1])
    # In lexical order a state is dominated by earlier states alone.
    order = np.lexsort(states[::-1])
    best = np.empty(0, dtype=np.int64)
    for begin in range(0, len(order), CHUNK_STATES):
        # It is enough to compare with the states kept so far, not with those that were dropped: a
        # state that a dropped one dominates is also dominated by the dropped one's dominator. For
        # the same reason it does not matter that some earlier states of a chunk are dropped too.
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
    """Returns an array [a, b]: whether state b of `by` is nowhere larger than state a."""
    below = by[0] <= states[0][:, None]
    for number in range(1, len(states)):
        below &= by[number] <= states[number][:, None]
    return below
