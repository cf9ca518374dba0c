"""Tiers of working bytes: what makes choices additive over layers.

A stage needs room for the most that any layer (or run of layers computed again) takes while it runs: a maximum, not a
sum. So the choices of a segment are bounded tier by tier: in a tier that most is in [low, high]; choices that need more
are not there, and at least `low` bytes are taken.

A run [a, b) keeps the input of layer a alone, and needs at least sum(h) - input(a) while it runs, where h = residuals +
input of a layer. In a tier sum(h) <= high + input(a), so charging each layer of the run input x h / (high + input) of
what the run keeps never charges too much: additive too.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.choices import Choices, PerLayer
from jvpipe.planners.segments import Block, Grid, sums

SINGLE, RUNS = 5, 3
"""The most tiers up to what one layer needs, and the number of those beyond, for runs."""
LONGEST = 8
"""Runs up to so many layers are looked at one by one to find the least bytes of a tier."""


@dataclass(frozen=True, eq=False)
class Tier:
    """From `low` to `high` working bytes.

    `in_run_bytes` is what a layer in a run is charged per micro-batch in flight; `most_input_bytes` the most that a
    run with this layer in it may have kept.
    """

    low: float
    high: float
    in_run_bytes: PerLayer
    most_input_bytes: PerLayer


def tiers(choices: Choices, limit_bytes: float) -> tuple[Tier, ...]:
    """The tiers of a model's choices under a limit."""
    single = choices.working_bytes[choices.allowed]
    values = np.unique(single[single <= limit_bytes])
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), SINGLE)).astype(int))
    high = [float(value) for value in values[places]] or [limit_bytes]
    most = min(limit_bytes, float(choices.run_bytes.sum() + choices.temporary_bytes.max()))
    if most > high[-1]:
        high += [float(np.floor(x)) for x in np.geomspace(max(high[-1], most / 1e6, 1.0), most, RUNS + 1)[1:]]
    found = [Tier(_next(choices, values, a), b, *_runs(choices, b)) for a, b in pairwise([-1.0, *high])]
    return tuple(tier for tier in found if tier.low <= tier.high) or (found[-1],)


def _next(choices: Choices, values: Float[np.ndarray, "V"], above: float) -> float:
    """A lower bound of the working bytes that are above a number: of single layers (`values`), and of runs."""
    found = float(values[values > above].min(initial=np.inf))
    n = len(choices.residual_bytes)
    run = choices.residual_bytes
    for length in range(2, n + 1):
        if length > LONGEST:
            return above + 1
        run = run[:-1] + choices.run_bytes[length - 1 :]
        if run.min() > above:  # and longer runs need more
            return min(found, float(run.min()))
        working = run + choices.temporary_bytes[length - 1 :]
        found = min(found, float(working[working > above].min(initial=np.inf)))
    return found


def _runs(choices: Choices, high: float) -> tuple[PerLayer, PerLayer]:
    """What layers in runs of at most `high` bytes are charged, and the most that their runs may have kept."""
    inputs, total, at = choices.input_bytes, sums(choices.run_bytes)[1:], np.arange(len(choices.input_bytes))
    first = np.minimum(np.searchsorted(total, total - high), at)  # where the run may begin
    most, least = range_max(inputs, first, at + 1), -range_max(-inputs, first, at + 1)
    return least * choices.run_bytes / np.maximum(high + most, 1.0), most


def range_max(values: PerLayer, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The largest value of each range [start, end), none empty; `starts` and `ends` have one shape."""
    levels = [values]
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    level = np.frexp(ends - starts)[1] - 1
    found = np.empty(np.shape(level))
    for at, table in enumerate(levels):
        here = level == at
        found[here] = np.maximum(table[starts[here]], table[ends[here] - 2**at])
    return found


def spread_max(per_layer: PerLayer, block: Block) -> Grid:
    """The largest of each segment's layers; 0 where a segment is empty."""
    starts = np.broadcast_to(block.starts[:, None], block.inside.shape)[block.inside]
    ends = np.broadcast_to(block.ends, block.inside.shape)[block.inside]
    found = np.zeros(block.inside.shape)
    found[block.inside] = range_max(per_layer, starts, ends)
    return found
