"""Decides from measured seconds whether another plan would pay, and with which cuts.

Legend: T seconds of the slowest device per micro-batch, L layers, S stages, M micro-batches,
v stages per device.

A slow device must not be mistaken for slow layers. So the measured seconds y of layer l on
device d are split into three factors:

    y[l] = w[l] r[l] f[d]

    w[l]    the seconds that the plan assumed for the layer
    f[d]    how many times longer than assumed the device takes: the median of y / w over its
            layers, each weighted by its w
    r[l]    the remaining factor, which belongs to the layer; set to 1 unless it is far from 1

With f and r, a dynamic program finds the best cuts (`cuts_at_speeds`). A slow device gets fewer
layers, and gets them back once its f is 1 again.

Noise in the measurements must not move layers, so the gain of other cuts must exceed a
threshold in several steps in a row, each judged by itself. The home plan is the one that
was planned or that the user gave. If the best cuts gain too little over the home plan, the
home plan's cuts are chosen. A return to the home plan needs only a smaller gain. `Rule` has the
thresholds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jvpipe.cost.hardware import Link
from jvpipe.ir.plan import Plan
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Bounds, Slowness, with_entry
from jvpipe.runtime.engine.monitor import TICK_S
from jvpipe.util.sizes import ROUNDING


def cuts_at_speeds(
    layer_s: np.ndarray,
    slowness: np.ndarray,
    fixed_s: Sequence[float],
    places: np.ndarray,
) -> tuple[int, ...]:
    """Finds how many layers each stage should have, so that the slowest stage takes least time.

    Two exact dynamic programs run over all cuts, each in O(S L^2). The first finds the least
    seconds of the slowest stage. The second finds, among cuts whose stages take no longer than
    that, those with the least sum over all stages. If devices have several stages, bounds then move
    one at a time until no move makes the slowest devices faster.

    Args:
        layer_s: the seconds of each layer on a device that is not slow.
        slowness: how many times longer each stage's device takes.
        fixed_s: the seconds of each stage that do not depend on its layers.
        places: the device of each stage.

    >>> cuts_at_speeds(np.ones(6), np.array([1.0, 2.0]), [0.0, 0.0], np.arange(2))
    (4, 2)
    """
    total = np.concatenate([[0.0], np.cumsum(layer_s)])
    bound = np.arange(len(layer_s) + 1)
    # run_s[i, j]: seconds of layers i to j - 1; a stage has at least one layer
    run_s = np.where(bound > bound[:, None], total - total[:, None], np.inf)
    of_stages = zip(slowness, fixed_s, strict=True)
    stages = [slow * run_s + more_s for slow, more_s in of_stages]
    # The least sum alone could make the slowest stage slower, and that stage limits the step.
    slowest_s = least_path(stages, np.maximum)[0] * (1 + ROUNDING)
    within = [np.where(stage_s <= slowest_s, stage_s, np.inf) for stage_s in stages]
    _, bounds = least_path(within, np.add)
    assert bounds is not None, "there are as many layers as stages need"
    if len(set(places)) < len(places):
        bounds = _balanced(bounds, stages, places)
    return tuple(np.diff(bounds).tolist())


def _balanced(
    bounds: Bounds,
    stages: Sequence[np.ndarray],
    places: np.ndarray,
) -> Bounds:
    """Moves bounds one at a time until no move makes the slowest devices faster.

    The loop ends, because each move lowers the sorted seconds, and there are finitely many bounds.

    Args:
        bounds: the bounds of the stages.
        stages: for each stage, its seconds by its first layer and the layer after its last.
        places: the device of each stage.
    """

    def slowest_first(bounds: Bounds) -> list[float]:
        ends = zip(stages, pairwise(bounds), strict=True)
        return sorted(np.bincount(places, [s[span] for s, span in ends]), reverse=True)

    while True:
        moved = [
            with_entry(bounds, s, at)
            for s in range(1, len(stages))
            for at in range(bounds[s - 1] + 1, bounds[s + 1])
        ]
        best = min([bounds, *moved], key=slowest_first)
        if best == bounds:
            return bounds
        bounds = best


@dataclass(frozen=True, slots=True)
class Rule:
    """How much evidence is enough for another plan.

    Args:
        gain: the share of a step's seconds that other cuts must save.
        gain_home: the share that returning to the home plan must save.
        steps: how many steps in a row must show such a gain.
        horizon_steps: steps within which a migration must save the seconds that it takes.
        layer: a layer's factor r counts as far from 1 if it is above this number or below its
            inverse.
        learn_steps: how many steps are used to learn the seconds of layers, if the plan was
            made without seconds.
        skip_steps: how many first steps are not used, because programs and caches are cold.
    """

    gain: float = 0.08
    gain_home: float = 0.02
    steps: int = 2
    horizon_steps: int = 200
    layer: float = 1.25
    learn_steps: int = 3
    skip_steps: int = 1


class Seen(NamedTuple):
    """A step's seconds per micro-batch: each layer's, and each stage's waits for copies."""

    layer_s: Sequence[float]
    exposed_s: Sequence[float]


def all_of(parts: Sequence[Seen]) -> Seen:
    """Adds up the seconds that several processes measured, each with 0 for what others measure.

    >>> all_of([Seen([1.0, 0.0], [0.5, 0.0]), Seen([0.0, 2.0], [0.0, 0.0])])
    Seen(layer_s=[1.0, 2.0], exposed_s=[0.5, 0.0])
    """
    fields = zip(*parts, strict=True)
    return Seen(*(list(map(sum, zip(*of, strict=True))) for of in fields))


@dataclass(frozen=True, slots=True)
class Replan:
    """The cuts of a better plan, and the seconds per step that they save by the measurements.

    `slowness` has, for each stage, how many times longer than planned its device takes for
    each layer of the model.
    """

    cuts: tuple[int, ...]
    why: str
    gain_s: float
    slowness: tuple[Slowness, ...] = ()

    def repays(self, moved_bytes: int, link: Link, rule: Rule) -> bool:
        """Tells whether moving takes fewer seconds than the new cuts save within the horizon.

        Args:
            moved_bytes: how many bytes would move.
            link: the link over which they would move.
            rule: has the horizon.
        """
        return link.seconds(moved_bytes) < self.gain_s * rule.horizon_steps


class Trigger:
    """An observer of a run's steps that finds better cuts.

    Attributes:
        rule: how much evidence is enough.
        home: the planned or given plan. The first plan that is observed becomes the home
            plan, and so does any later plan that does not have the cuts `asked`.
        asked: the cuts that the next plan should have. `observe` sets `asked` to the cuts that
            it returns. A caller that moves to other cuts instead must set `asked` to those.
        refused: cuts that are impossible or do not pay; `observe` does not return them
            until the plan changes.

    >>> trigger, plan = Trigger([1.0] * 6, 4, synchronous=True), Plan.from_cuts([3, 3])
    >>> slow = Seen([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [0.0, 0.0])
    >>> steps = [Seen([1.0] * 6, [0.0, 0.0]), slow, slow]
    >>> [replan.cuts if (replan := trigger.observe(plan, seen)) else None for seen in steps]
    [None, None, (4, 2)]
    """

    def __init__(
        self,
        expected_s: Sequence[float] | None,
        microbatches: int,
        *,
        synchronous: bool,
        rule: Rule = Rule(),
    ) -> None:
        """Begins without a home plan: the first plan that is observed becomes the home plan.

        Args:
            expected_s: the seconds of each layer on which the plan was based; None if it
                was made without seconds.
            microbatches: how many micro-batches a step has.
            synchronous: whether the pipeline is flushed at the end of a step.
            rule: how much evidence is enough.
        """
        self.rule = rule
        self._expected = None if expected_s is None else np.maximum(expected_s, TICK_S)
        self._microbatches, self._synchronous = microbatches, synchronous
        self._skip = rule.skip_steps
        self._learned: list[Sequence[float]] = []
        self._window: deque[Seen] = deque(maxlen=rule.steps)
        self._plan: Plan | None = None
        self.home = Plan(())
        self.asked: tuple[int, ...] | None = None
        self.refused: set[tuple[int, ...]] = set()

    def observe(self, plan: Plan, seen: Seen) -> Replan | None:
        """Takes in the seconds of a step; returns other cuts if there is enough evidence for them.

        Args:
            plan: the plan under which the step ran.
            seen: the seconds of the step.
        """
        if min(seen.layer_s) <= 0:  # not all layers ran in this step
            return None
        self._follow(plan)
        if self._skip:
            self._skip -= 1
            return None
        if self._expected is None:
            self._learned.append(seen.layer_s)
            if len(self._learned) == self.rule.learn_steps:
                self._expected = np.maximum(np.median(self._learned, axis=0), TICK_S)
            return None
        if self._better(plan, seen) is None:
            self._window.clear()
            return None
        self._window.append(seen)
        if len(self._window) < self.rule.steps:
            return None
        # Each of these steps has shown a gain. The cuts are chosen for the mean of their seconds.
        fields = zip(*self._window, strict=True)
        means = Seen(*(np.mean(of, axis=0).tolist() for of in fields))
        replan = self._better(plan, means)
        self._window.clear()
        self.asked = replan.cuts if replan else None
        return replan

    def _follow(self, plan: Plan) -> None:
        """Takes in a new plan, which becomes the home plan unless it has the cuts `asked`."""
        if plan == self._plan:
            return
        if plan.cuts != self.asked:
            self.home = plan
        self._plan, self.asked = plan, None
        self._window.clear()
        self.refused.clear()

    def _better(self, plan: Plan, seen: Seen) -> Replan | None:
        """Returns the best cuts for the seconds of a step; None if they gain too little."""
        expected, rule = self._expected, self.rule
        assert expected is not None
        devices, places = np.unique(_devices(plan), return_inverse=True)
        slowness = _slowness(expected, plan, seen)
        # The product is w f of each layer, and ratio is r.
        ratio = np.array(seen.layer_s) / (expected * np.repeat(slowness, plan.cuts))
        far = (ratio > rule.layer) | (ratio < 1 / rule.layer)
        ratio = np.where(far, ratio, 1.0)
        seconds = expected * ratio
        chunks = len(places) / len(devices)

        def step_s(cuts: Sequence[int]) -> float:
            parts_s = _of_stages(seconds, cuts) * slowness + seen.exposed_s
            # The stages of a device take turns, so their seconds add up.
            slowest_s = np.bincount(places, parts_s).max()
            return self._step_s(float(slowest_s), float(parts_s.sum()), chunks)

        now_s = step_s(plan.cuts)
        home = self.home.cuts
        least_s = self._least_step_s(float(seconds.sum()), slowness, chunks)
        needed_gain = rule.gain if plan.cuts == home else rule.gain_home
        # No cuts are sought if even a step as short as the lower bound gains too little.
        if now_s - least_s <= now_s * needed_gain:
            return None
        cuts = cuts_at_speeds(seconds, slowness, seen.exposed_s, places)
        goes_home = step_s(cuts) >= step_s(home) * (1 - rule.gain)
        if goes_home:
            cuts = home
        gain_s = now_s - step_s(cuts)
        enough = gain_s > now_s * (rule.gain_home if goes_home else rule.gain)
        if not enough or cuts == plan.cuts or cuts in self.refused:
            return None
        why = self._why(expected, plan, seen, goes_home)
        times = np.outer(slowness, ratio).tolist()
        return Replan(cuts, why, gain_s, tuple(map(tuple, times)))

    def _least_step_s(self, total_s: float, slowness: np.ndarray, chunks: float) -> float:
        """Returns a lower bound on the seconds of a step under any cuts.

        If work could be divided anywhere, not only between layers, all devices could be
        busy for the same time: the total divided by the sum of 1 / f over all devices. The
        slowest device takes at least that long. The stages together take at least as long as
        the fastest device would take for all the work: the total times the least f.
        """
        # `slowness` has the f of a device once for each of its stages.
        shared_s = chunks * total_s / sum(1 / slowness)
        return self._step_s(shared_s, total_s * slowness.min(), chunks)

    def _step_s(self, slowest_s: float, all_s: float, chunks: float) -> float:
        """Estimates a step's seconds as `surrogate` does (`stage_cost.py`), without transfers.

        Without a flush, a step takes M T. With a flush, it takes (M - 1 / v) T, plus 1 / v of the
        seconds of all stages (`all_s`). `chunks` is v.
        """
        if self._synchronous:
            return (self._microbatches - 1 / chunks) * slowest_s + all_s / chunks
        return self._microbatches * slowest_s

    def _why(self, expected: np.ndarray, plan: Plan, seen: Seen, goes_home: bool) -> str:
        """Names the reason: the stage whose seconds are furthest from the planned seconds."""
        took_s = _of_stages(np.array(seen.layer_s), plan.cuts) + seen.exposed_s
        ratio = took_s / _of_stages(expected, plan.cuts)
        # All stages may be slower than planned. If there are three or more, the stage
        # furthest from the median is named.
        relative = ratio / np.median(ratio) if len(ratio) > 2 else ratio
        stage = int(np.abs(np.log(relative)).argmax())
        if goes_home and np.all(ratio < self.rule.layer):
            return "every stage takes what was planned again"
        return f"stage {stage} takes {ratio[stage]:.1f} times what was planned"


def _of_stages(layer_s: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """Adds up the seconds of each stage's layers."""
    starts = np.cumsum([0, *cuts[:-1]])
    return np.add.reduceat(layer_s, starts)


def _slowness(expected: np.ndarray, plan: Plan, seen: Seen) -> np.ndarray:
    """Returns how many times longer than planned the device of each stage takes.

    Args:
        expected: the planned seconds of each layer.
        plan: the plan under which the step ran.
        seen: the seconds of the step.
    """
    ratio = np.array(seen.layer_s) / expected
    devices = _devices(plan)
    at = np.repeat(devices, plan.cuts)
    return np.array([_median(ratio[at == d], expected[at == d]) for d in devices])


def _devices(plan: Plan) -> list[int]:
    """Returns the device of each stage; the first one if the stage has replicas."""
    return [stage.devices[0] for stage in plan.stages]


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Returns the weighted median: at most half of the weight is below it, at most half above."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    middle = np.searchsorted(reached, reached[-1] / 2)
    return float(values[order[middle]])
