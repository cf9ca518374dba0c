"""Finds the smallest memory limit that any plan keeps, and makes the error for a limit below it.

Peak bytes are the most that a device of a stage holds at once. The smallest limit is that
of the emptiest plan, whose fullest stage has the least peak. Its seconds do not matter.

Finding the fewest bytes of one segment takes long (`min_bytes.py`). So each segment first
has a lower bound of its peak. A search settles segments, that is, it finds their true
peaks, only along the path of cuts that looks emptiest so far. It ends when that path is
settled: all other paths have bounds that are not lower. For models of many layers the
search ends sooner, near the smallest limit. `LIMIT` in `effort.py` says when; its numbers
may be changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, pairwise
from math import comb

import numpy as np

from jvpipe.planners.joint.cut_windows import Reach, area, bounded
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.lot import Lot, cells
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.model.chain_dp import least_max, least_sufficient, least_sum
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.segments import CutBlock
from jvpipe.planners.model.spans import Cuts, Grid
from jvpipe.planners.model.stage_bytes import on_device_bytes


@dataclass(frozen=True)
class Floor:
    """A plan, and the most bytes that the device of each stage holds under the plan."""

    decision: Decision
    held_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes that the fullest device holds."""
        return max(self.held_bytes)

    @property
    def stage(self) -> int:
        """The fullest stage."""
        return self.held_bytes.index(self.bytes)

    @property
    def fullness(self) -> list[int]:
        """The bytes of all devices, the fullest first; lists of emptier plans compare as less."""
        return sorted(self.held_bytes, reverse=True)


def min_bytes_plan(pricing: Pricing) -> Floor:
    """Finds the plan that keeps the smallest limit, whatever its seconds.

    Args:
        pricing: the choices of all layers; its own limit is ignored.
    """
    pricing = replace(pricing, limit_bytes=np.inf)
    cuts = pricing.segments.windows
    plan = None
    if area(cuts) <= LIMIT.all_cells:
        plan = _min_bytes_plan(pricing, cuts)
    else:
        least = _least_reached_bytes(pricing)
        # Each bound gets a window: the cuts that stages can reach under a limit. `least` is only a
        # lower bound, so perhaps no plan keeps it, and larger limits are tried. All plans that keep
        # a limit lie in its windows. So once the plan found keeps the limit, no wider windows are
        # needed.
        for slack in (1.02, 1.2, 3.0):
            limit = least * slack
            windows = Reach(replace(pricing, limit_bytes=limit)).windows(np.inf)
            plan = _min_bytes_plan(pricing, bounded(windows))
            if plan and plan.bytes <= limit:
                break
    assert plan is not None, "without a limit there is a plan"
    return plan


def _least_reached_bytes(pricing: Pricing) -> float:
    """Finds nearly the least limit under which stages reach the last layer (`cut_windows.py`).

    The interval that is halved ends at a limit under which the first stage alone reaches
    the last layer: the bytes of a device that has the whole model and recomputes all of it.
    """
    segments = pricing.segments
    problem = segments.problem
    again = pricing.choices.run_bytes.sum() * max(segments.in_flight)
    less = max(map(problem.less_bytes, range(problem.stages)))
    high = float(segments.static_bytes(0)[-1] + again + 1) + less

    def suffices(limit_bytes: float) -> bool:
        return Reach(replace(pricing, limit_bytes=limit_bytes)).reaches_end(np.inf)

    return least_sufficient(suffices, 0.0, high, LIMIT.tolerance)


def min_bytes_plans(pricing: Pricing) -> Iterator[Floor]:
    """Yields the emptiest plan of each choice of cuts, the emptiest first.

    It yields nothing if there are more choices of cuts than `LIMIT.cuts`.

    Args:
        pricing: the choices of all layers; its own limit is ignored.
    """
    pricing = replace(pricing, limit_bytes=np.inf)
    cuts = pricing.segments.windows
    inner_bounds = len(cuts) - 2
    places = range(1, len(pricing.segments.cuts) - 1)
    # The caller (`floor.py`) can do without these plans: it also tries the neighbors of plans.
    if comb(len(places), inner_bounds) > LIMIT.cuts:
        return
    peaks = Peaks(pricing, cuts)
    plans = list[Floor]()
    for inner in combinations(places, inner_bounds):
        # The window of bound s begins behind the first s cuts, so its indices are s lower.
        path = (0, *(place - s for s, place in enumerate(inner, 1)), 0)
        if peaks.settle_path(path, np.inf) < np.inf:
            plans.append(peaks.plan(path))
    yield from sorted(plans, key=lambda plan: plan.bytes)


class Peaks:
    """The peak bytes of all segments between cuts: lower bounds, or true numbers once settled.

    Args:
        pricing: the choices of all layers, without a limit.
        cuts: for each bound of the stages, the cuts at which it may lie.
    """

    def __init__(self, pricing: Pricing, cuts: list[Cuts]) -> None:
        segments = pricing.segments
        self.pricing = pricing
        self.cuts = cuts
        self.exact = segments.n <= LIMIT.exact_layers
        self.blocks = [segments.block(s, *near) for s, near in enumerate(pairwise(cuts))]
        self.bytes = [self._least_bytes(block) for block in self.blocks]
        self.choices: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def _least_bytes(self, block: CutBlock) -> Grid:
        """Bounds the peak bytes of segments from below; infinite for segments without layers."""
        least = self.pricing.at(block.s).least_bytes(block)
        return np.where(block.inside, np.maximum(least, block.reducing_bytes), np.inf)

    def settle(
        self,
        s: int,
        a: int,
        b: int,
        below: float,
    ) -> float:
        """Returns a segment's peak bytes, which are settled first if they may be less than `below`.

        Args:
            s: the stage.
            a: the index of the segment's start among the cuts of bound s.
            b: the index of the segment's end among the cuts of bound s + 1.
            below: if the peak is at least this, any number from `below` to the peak is returned.
        """
        peaks = self.bytes[s]
        if (s, a, b) in self.choices or peaks[a, b] >= below:
            return float(peaks[a, b])
        pricing = self.pricing
        block = self.blocks[s]
        fixed = float(block.fixed_bytes[a, b])
        cell = s, int(block.starts[a]), int(block.ends[b])
        lot = Lot.of_stage(pricing.segments.in_flight[s], cell)
        held_bytes, self.choices[s, a, b], bound_bytes = fewest_bytes(
            pricing,
            lot,
            exact=self.exact,
            below=below - fixed,
        )
        # A longer segment that contains this one needs nearly as many bytes, or more. So the bounds
        # of longer segments are raised now, and many of them never have to be settled.
        longer = peaks[: a + 1, b:]
        least_bytes = longer_bytes(pricing, block, a, b, bound_bytes)
        np.maximum(longer, least_bytes, out=longer)
        peaks[a, b] = max(fixed + held_bytes, block.reducing_bytes[a, b])
        return float(peaks[a, b])

    def settle_path(self, places: Sequence[int], below: float) -> float:
        """Settles the segments of a path, and returns the peak bytes of the fullest.

        Args:
            places: for each bound, the index of its cut.
            below: from this many bytes on, the exact number does not matter.
        """
        return max(self.settle(*cell, below) for cell in cells(places))

    def plan(self, places: Sequence[int]) -> Floor:
        """Makes the plan of a path whose segments are settled, given the index of each cut."""
        path = cells(places)
        taken = tuple(int(self.bytes[s][a, b]) for s, a, b in path)
        pairs = zip(self.cuts, places, strict=True)
        bounds = tuple(int(cuts[place]) for cuts, place in pairs)
        choices = tuple(choice for cell in path for choice in self.choices[cell])
        return Floor(Decision(bounds, choices), taken)


def _min_bytes_plan(pricing: Pricing, cuts: list[Cuts]) -> Floor | None:
    """Finds the emptiest plan between these cuts; None if there is no plan.

    For models of more than `LIMIT.exact_layers` layers it may be a plan that is nearly as
    empty, or None if no plan was found in time.
    """
    peaks = Peaks(pricing, cuts)
    near = 1 if peaks.exact else 1 + LIMIT.tolerance
    best: Floor | None = None
    for rounds in count(1):
        # Each path has a highest bound, that of its fullest segment. `highest` is the least of
        # these over all paths. So no plan holds less, and a plan that holds no more is the
        # emptiest, unless `fewest_bytes` missed the fewest bytes of a settled segment. The loop
        # ends, because each round settles another segment.
        highest = least_max(peaks.bytes)
        if highest == np.inf:
            return None
        # Among paths that may hold as little as `highest`, the one with the least sum is settled.
        may_hold = [np.where(peak <= highest, peak, np.inf) for peak in peaks.bytes]
        _, places = least_sum(may_hold)
        assert places is not None, "there are as many cuts as stages need"
        below = float(best.bytes) if best else np.inf
        if peaks.settle_path(places, below) < below:
            best = peaks.plan(places)
        if best and best.bytes <= highest * near:
            return best
        most_rounds = LIMIT.rounds_with_plan if best else LIMIT.rounds_without_plan
        if rounds > most_rounds and not peaks.exact:
            break
    return best


def longer_bytes(
    pricing: Pricing,
    block: CutBlock,
    a: int,
    b: int,
    least_bytes: float,
) -> Grid:
    """Bounds from below the peak bytes of longer segments, which contain one with known bytes.

    The choices of a longer segment also suit the known segment inside it. So the longer one
    needs at least as many bytes, less three differences:

    - A run (layers that are recomputed together) may begin before the known segment. In the known
      segment alone, the run begins with the segment's first layer. The input of that layer is then
      kept in place of the input of an earlier layer.
    - A run may end after the known segment. If it is cut off there, its last layer may need more.
    - Shared values that only later layers read are freed before the known segment works.

    Args:
        pricing: the choices of all layers.
        block: the segments of a stage.
        a: the index of the known segment's start.
        b: the index of its end.
        least_bytes: no choices of the known segment take fewer, its fixed bytes not counted.
    """
    choices = pricing.at(block.s).choices
    starts = block.starts[: a + 1]
    last = block.ends[b] - 1
    # The first difference: by how much the input of the known segment's first layer is
    # larger than the smallest input from the start of the longer segment on.
    inputs = choices.input_bytes[starts[0] : starts[a] + 1]
    least = np.minimum.accumulate(inputs[::-1])[::-1]
    larger = inputs[-1] - least[starts - starts[0]]
    begun = on_device_bytes(pricing.segments.in_flight[block.s], larger)
    # The second difference: what a run needs in addition if it ends with the known segment.
    # This is 0 if the longer segment also ends there.
    more_at_end = choices.recompute_peak_bytes[last] - choices.residual_bytes[last]
    ended = np.full(len(block.ends) - b, max(0.0, more_at_end))
    ended[0] = 0.0
    shared = block.shared_bytes[: a + 1, b:]
    spared = begun[:, None] + ended + (shared - shared[:, :1])
    return block.fixed_bytes[: a + 1, b:] + least_bytes - spared


def nothing_fits(pricing: Pricing) -> Infeasible:
    """Makes the error for a limit that no plan keeps; it names the smallest limit that suffices.

    Args:
        pricing: the choices of all layers, and the limit.
    """
    plan = min_bytes_plan(pricing)
    stage = plan.stage
    limit = int(pricing.limit_bytes)
    i, j = plan.decision.bounds[stage : stage + 2]
    over = plan.bytes - limit
    problem = pricing.segments.problem
    stage_limit = limit - problem.less_bytes(stage)
    where = f" of {problem.name_of(stage)}" if problem.unlike_limits else " per device"
    return Infeasible(
        f"no plan keeps the limit of {stage_limit} bytes{where}: "
        f"at best, stage {stage} (layers {i} to {j - 1}) takes {over} bytes more. "
        f"The smallest limit that would do is {problem.enough_said(plan.bytes)}; "
        "raise the limit, add stages, or use smaller micro-batches",
        smallest_limit_bytes=plan.bytes,
    )
