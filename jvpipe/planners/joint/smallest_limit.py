"""The smallest memory limit that any plan keeps, and the message for a limit below it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb

import numpy as np

from jvpipe.planners.joint.cut_windows import Reach, area, bounded
from jvpipe.planners.joint.dominance import Lot
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.model.chain_dp import least_max, least_sum
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.segments import CutBlock, Cuts, Grid
from jvpipe.planners.model.stage_bytes import on_device_bytes


@dataclass(frozen=True)
class MinBytesPlan:
    """A decision whose fullest stage is as empty as can be."""

    decision: Decision
    stage: int
    peak_bytes: int


def min_bytes_plan(pricing: Pricing) -> MinBytesPlan:
    """Finds the plan of the smallest limit, whatever its seconds."""
    segments = pricing.segments
    pricing = replace(pricing, limit_bytes=np.inf)
    cuts = segments.windows
    if area(cuts) <= LIMIT.all_cells:
        plan = _min_bytes_plan(pricing, cuts)
        assert plan is not None, "without a limit there is a plan"
        return plan
    # The least limit under which the end can be reached, between nothing and what a device holds
    # that has the whole model and computes all of it again.
    stages = segments.problem.stages
    again = pricing.choices.run_bytes.sum() * max(segments.in_flight)
    less = max(map(segments.problem.less_bytes, range(stages)))
    low = 0.0
    high = float(segments.static_bytes(0)[-1] + again + 1) + less
    while high - low > LIMIT.tolerance * high:
        middle = (low + high) / 2
        reach = Reach(replace(pricing, limit_bytes=middle), ((),) * stages)
        low, high = (low, middle) if reach.left(np.inf)[-1] == segments.n else (middle, high)
    # Reaches are lower bounds, so the limit may be a little too small for any plan: wider windows follow.
    plan = None
    for slack in (1.02, 1.2, 3.0):
        reach = Reach(replace(pricing, limit_bytes=high * slack), ((),) * stages)
        plan = _min_bytes_plan(pricing, bounded(reach.windows(np.inf)))
        if plan and plan.peak_bytes <= high * slack:
            break
    assert plan is not None
    return plan


def min_bytes_plans(pricing: Pricing) -> Iterator[MinBytesPlan]:
    """Yields the plan of the fewest bytes for every cut, the emptiest first; of more than
    `LIMIT.cuts`, none.
    """
    pricing = replace(pricing, limit_bytes=np.inf)
    cuts = pricing.segments.windows
    places = range(1, len(pricing.segments.cuts) - 1)
    # Whoever asks falls back on the search that goes from one plan to its neighbours.
    if comb(len(places), len(cuts) - 2) > LIMIT.cuts:
        return
    peaks = Peaks(pricing, cuts)
    plans = list[MinBytesPlan]()
    for inner in combinations(places, len(cuts) - 2):
        path = (0, *(place - s for s, place in enumerate(inner, 1)), 0)
        if max(peaks.settle(s, a, b, np.inf) for s, (a, b) in enumerate(pairwise(path))) < np.inf:
            plans.append(peaks.plan(path))
    yield from sorted(plans, key=lambda plan: plan.peak_bytes)


class Peaks:
    """The peak bytes of the segments between cuts: lower bounds at first, and the truth of those
    that are settled.
    """

    def __init__(self, pricing: Pricing, cuts: list[Cuts]) -> None:
        segments = pricing.segments
        self.pricing = pricing
        self.cuts = cuts
        self.exact = segments.n <= LIMIT.exact_layers
        self.blocks = [segments.block(s, *near) for s, near in enumerate(pairwise(cuts))]
        self.bytes = [
            np.where(b.inside, np.maximum(pricing.at(b.s).least_bytes(b), b.reducing_bytes), np.inf)
            for b in self.blocks
        ]
        self.choices: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def settle(self, s: int, a: int, b: int, below: float) -> float:
        """Counts a segment's peak; of what is not below a number, that number or more.

        Args:
            s: the stage.
            a: the place of the segment's start among the cuts of stage s.
            b: the place of its end among those of the stage after.
            below: bytes; of segments that take as many nothing more is asked.
        """
        if (s, a, b) not in self.choices and self.bytes[s][a, b] < below:
            fixed = float(self.blocks[s].fixed_bytes[a, b])
            cell = s, int(self.cuts[s][a]), int(self.cuts[s + 1][b])
            lot = Lot.of_stage(self.pricing.segments.in_flight[s], cell)
            held_bytes, self.choices[s, a, b] = fewest_bytes(
                self.pricing, lot, exact=self.exact, below=below - fixed
            )
            # What this segment needs, segments around it need too, nearly: many are never settled.
            longer = self.bytes[s][: a + 1, b:]
            least_bytes = longer_bytes(self.pricing, self.blocks[s], a, b, held_bytes)
            np.maximum(longer, least_bytes, out=longer)
            reducing = float(self.blocks[s].reducing_bytes[a, b])
            self.bytes[s][a, b] = max(fixed + held_bytes, reducing)
        return float(self.bytes[s][a, b])

    def plan(self, places: Sequence[int]) -> MinBytesPlan:
        """Makes the plan of settled segments, given the places of its cuts."""
        cells = [(s, a, b) for s, (a, b) in enumerate(pairwise(places))]
        taken = [float(self.bytes[s][a, b]) for s, a, b in cells]
        bounds = tuple(int(x[place]) for x, place in zip(self.cuts, places, strict=True))
        choices = tuple(choice for cell in cells for choice in self.choices[cell])
        return MinBytesPlan(Decision(bounds, choices), int(np.argmax(taken)), int(max(taken)))


def _min_bytes_plan(pricing: Pricing, cuts: list[Cuts]) -> MinBytesPlan | None:
    """Between these cuts: lower bounds at first, and the truth where the best path asks for it."""
    peaks, rounds = Peaks(pricing, cuts), 0
    best: MinBytesPlan | None = None
    while True:
        # Lower bounds rise as segments are settled, and so does the least of the highest ones. Once a
        # plan holds no more than that, none holds less. Each round settles a segment, so that it ends.
        highest = least_max(peaks.bytes)
        rounds = rounds + 1
        if highest == np.inf:
            return None
        # Among the paths that may hold as little, the one of the least sum is settled.
        _, places = least_sum([np.where(peak <= highest, peak, np.inf) for peak in peaks.bytes])
        assert places is not None, "there are as many cuts as stages need"
        below = float(best.peak_bytes) if best else np.inf
        taken = max(peaks.settle(s, a, b, below) for s, (a, b) in enumerate(pairwise(places)))
        if taken < below:
            best = peaks.plan(places)
        if best and best.peak_bytes <= highest * (1 if peaks.exact else 1 + LIMIT.tolerance):
            return best
        most_rounds = LIMIT.rounds_with_plan if best else LIMIT.rounds_without_plan
        if rounds > most_rounds and not peaks.exact:
            return best


def longer_bytes(pricing: Pricing, block: CutBlock, a: int, b: int, held_bytes: float) -> Grid:
    """Bounds the peak bytes from below of segments with all layers of one that holds so many beside
    what is fixed.

    Their choices do for it too, but that a run of layers computed again may have to begin at its
    first layer: then the input of that one is kept and not of one before it. Or it ends at its last
    layer. And shared values that come after need no room beside it.

    Args:
        pricing: of the model.
        block: the segments of a stage.
        a: the place of the known segment's start.
        b: the place of its end.
        held_bytes: its bytes beside what is fixed.
    """
    choices = pricing.at(block.s).choices
    starts = block.starts[: a + 1]
    last = block.ends[b] - 1
    in_flight = pricing.segments.in_flight[block.s]
    # The input that a run keeps if it begins at the known segment's first layer, over the least
    # that it may keep if it begins at a layer before.
    inputs = choices.input_bytes[starts[0] : starts[a] + 1]
    least = np.minimum.accumulate(inputs[::-1])[::-1]
    begun = on_device_bytes(in_flight, inputs[-1] - least[starts - starts[0]])
    # What a run needs more if it ends with the known segment; the segment itself ends there anyhow.
    more_at_end = choices.recompute_peak_bytes[last] - choices.residual_bytes[last]
    ended = np.full(len(block.ends) - b, max(0.0, more_at_end))
    ended[0] = 0.0
    shared = block.shared_bytes[: a + 1, b:]
    spared = begun[:, None] + ended + (shared - shared[:, :1])
    return block.fixed_bytes[: a + 1, b:] + held_bytes - spared


def nothing_fits(pricing: Pricing) -> Infeasible:
    """Says where the plan of min_bytes_plan is over the limit, and by how much."""
    plan = min_bytes_plan(pricing)
    limit = int(pricing.limit_bytes)
    i, j = plan.decision.bounds[plan.stage : plan.stage + 2]
    over = plan.peak_bytes - limit
    problem = pricing.segments.problem
    stage_limit = limit - problem.less_bytes(plan.stage)
    unlike = any(group.less_bytes for group in problem.groups)
    where = f" of {problem.name_of(plan.stage)}" if unlike else " per device"
    per_device = ", or as much more on each device" if unlike else ""
    return Infeasible(
        f"no plan keeps the limit of {stage_limit} bytes{where}: at best, stage {plan.stage} (layers {i} to {j - 1}) "
        f"takes {over} bytes more. The smallest limit that would do is {plan.peak_bytes} bytes{per_device}; "
        "raise the limit, "
        "add stages, or use smaller micro-batches",
        stage=plan.stage,
        excess_bytes=over,
        smallest_limit_bytes=plan.peak_bytes,
        decision=plan.decision,
    )
