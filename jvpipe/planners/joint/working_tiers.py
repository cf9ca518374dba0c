"""Tiers of working bytes: what makes choices additive over layers.

A segment takes what its layers hold for k micro-batches, and beyond that the most, over layers, of working bytes less
what later layers leave of one micro-batch: a maximum, not a sum. Two sums bound it: what its last layer works with is
beyond; and if some layer, or run of layers computed again, works with at least `low` bytes, it takes low and what is
held for k - 1 micro-batches. The first is near the truth where layers are run again one by one, the second where runs
are long. So choices are bounded tier by tier: in a tier the most that any layer works with is in [low, high]; choices
that need more are not there.

A run [a, b) keeps the input of layer a alone, and works with at least sum(h) - input(a), where h is what a layer adds
to a run. In a tier sum(h) <= high + input(a), so charging each layer of the run input x h / (high + input) of what the
run keeps never charges too much: additive too.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jvpipe.planners.joint.choice_arrays import Choices, PerLayer
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.model.segments import Block, Grid, sums


@dataclass(frozen=True, eq=False)
class Tier:
    """From `low` to `high` working bytes; segments are bounded by their last layer, or by `low`.

    `in_run_bytes` is what a layer in a run is charged per micro-batch in flight; `most_input_bytes` the most that a
    run with this layer in it may have kept.
    """

    low: float
    high: float
    in_run_bytes: PerLayer
    most_input_bytes: PerLayer
    by_low: bool = False

    @property
    def views(self) -> tuple["Tier", ...]:
        """The tier by each of its bounds."""
        return (self, replace(self, by_low=True)) if self.low > 0 else (self,)


def tiers(choices: Choices, limit_bytes: float, runs: int = FATE.run_tiers) -> tuple[Tier, ...]:
    """Makes the tiers of a model's choices under a limit, at most so many for runs.

    Args:
        choices: those of the model.
        limit_bytes: of a device.
        runs: how many tiers there are for runs at most.
    """
    single = choices.working_bytes[choices.allowed]
    one = float(single[single <= limit_bytes].max(initial=0.0))
    most = min(limit_bytes, _most(choices))
    every = [Tier(0.0, one, *_runs(choices, one))]
    if most > one:
        highs = np.floor(np.geomspace(max(one, most / 1e6, 1.0), most, runs + 1))[1:].tolist()
        for above, high in pairwise([one, *highs]):
            if (low := _next(choices, above)) <= high:
                every.append(Tier(low, high, *_runs(choices, high)))
    return tuple(every)


def _next(choices: Choices, above: float) -> float:
    """A lower bound of the working bytes of runs that are above a number."""
    least_above, n = np.inf, len(choices.residual_bytes)
    least = np.minimum(choices.residual_bytes, choices.recompute_peak_bytes)
    before = np.zeros(n)  # of the layers before the run's last, with the inputs between
    for length in range(1, n + 1):
        if length > FATE.enumerated_layers:
            return above + 1
        if length > 1:
            before = (
                before[:-1]
                + choices.residual_bytes[length - 2 : -1]
                + choices.input_bytes[length - 1 :]
            )
        if (
            fewest := float((before + least[length - 1 :]).min())
        ) > above:  # and longer runs need more
            return min(least_above, fewest)
        for own in (choices.residual_bytes, choices.recompute_peak_bytes):
            working = before + (own + choices.temporary_bytes)[length - 1 :]
            least_above = min(least_above, float(working[working > above].min(initial=np.inf)))
    return least_above


def _most(choices: Choices) -> float:
    """What a run of all layers works with at most."""
    last = (
        np.maximum(choices.residual_bytes, choices.recompute_peak_bytes) + choices.temporary_bytes
    )
    return float((choices.residual_bytes + choices.input_bytes).sum() + last.max())


def _runs(choices: Choices, high: float) -> tuple[PerLayer, PerLayer]:
    """What layers in runs of at most `high` bytes are charged, and the most that their runs may have kept."""
    inputs, total, at = (
        choices.input_bytes,
        sums(choices.run_bytes)[1:],
        np.arange(len(choices.input_bytes)),
    )
    first = np.minimum(np.searchsorted(total, total - high), at)  # where the run may begin
    most, least = range_max(inputs, first, at + 1), -range_max(-inputs, first, at + 1)
    return least * choices.run_bytes / np.maximum(high + most, 1.0), most


def range_max(values: PerLayer, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Finds the largest value of each range [start, end), none empty; `starts` and `ends` have one shape.

    Args:
        values: one by layer.
        starts: the first of each range.
        ends: behind the last of each, in the shape of `starts`.
    """
    levels = [values]
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    level = np.frexp(ends - starts)[1] - 1
    largest = np.empty(np.shape(level))
    for at, table in enumerate(levels):
        here = level == at
        largest[here] = np.maximum(table[starts[here]], table[ends[here] - 2**at])
    return largest


def spread_max(per_layer: PerLayer, block: Block) -> Grid:
    """Finds the largest of each segment's layers; 0 where a segment is empty."""
    starts = np.broadcast_to(block.starts[:, None], block.inside.shape)[block.inside]
    ends = np.broadcast_to(block.ends, block.inside.shape)[block.inside]
    grid = np.zeros(block.inside.shape)
    grid[block.inside] = range_max(per_layer, starts, ends)
    return grid
