"""Judges by measured seconds whether another plan would pay, and with which cuts.

Legend: T the slowest stage; L layers, S stages.

A slow device is not a slow layer. Layer l on the device d of its stage is modelled to take

    y[l] = w[l] r[l] f[d]

w seconds that the plan counted on, f how many times longer the device takes than it should (the median over its
layers, each with the weight of its seconds), r what is left to the layer itself (1 unless it is far from 1). So cuts
for these seconds take layers away from a slow device, and give them back once its f is 1 again.

Noise moves nothing: the gain must pass a threshold in several steps in a row, each judged by itself. The way back has
a lower one: it is to the plan at home, the one that was planned or asked for, once no other cuts were worth leaving it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvpipe.cost.hardware import Link
from jvpipe.ir.plan import Plan
from jvpipe.planners.model.chain_dp import least_path

_EQUAL = 1 + 1e-9  # sums of floats are not exact


def cuts_at_speeds(
    layer_s: Sequence[float], slowness: Sequence[float], fixed_s: Sequence[float] = ()
) -> list[int]:
    """Layers per stage with the least slowest stage, and of those cuts the ones with the least sum of all stages.

    Two dynamic programs over contiguous cuts, each O(S L^2), exact: one for T, one for the sum within T.

    Args:
        layer_s: seconds of each layer on a device as it should be.
        slowness: how many times longer the device of each stage takes.
        fixed_s: seconds of each stage whatever its layers are.

    >>> cuts_at_speeds([1.0] * 6, [1.0, 1.0]), cuts_at_speeds([1.0] * 6, [1.0, 2.0])
    ([3, 3], [4, 2])
    """
    total, places = np.concatenate([[0.0], np.cumsum(layer_s)]), np.arange(len(layer_s) + 1)
    each_s = np.where(places > places[:, None], total - total[:, None], np.inf)
    stages = [
        slow * each_s + fixed
        for slow, fixed in zip(slowness, fixed_s or [0.0] * len(slowness), strict=True)
    ]
    most_s = least_path(stages, np.maximum)[0] * _EQUAL
    _, bounds = least_path(
        (np.where(stage_s <= most_s, stage_s, np.inf) for stage_s in stages), np.add
    )
    assert bounds is not None, "there are as many layers as stages need"
    return np.diff(bounds).tolist()


# Judges by measured seconds whether another plan would pay, and with which cuts.

_LEAST_S = 1e-9  # no layer takes nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """Says how much evidence is enough for another plan.

    Args:
        gain: the share of a step's seconds that other cuts must save.
        gain_home: the same for returning to the plan at home.
        steps: in so many steps in a row.
        horizon_steps: within which a migration must repay the seconds that it takes.
        layer: the factor within which a layer takes what was planned.
        learn_steps: steps whose seconds are expected from then on, if the plan was made without any.
        skip_steps: steps before these, in which all is new.
    """

    gain: float = 0.08
    gain_home: float = 0.02
    steps: int = 2
    horizon_steps: int = 200
    layer: float = 1.25
    learn_steps: int = 3
    skip_steps: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of a step per micro-batch: each layer's forward and backward, each stage's wait for copies."""

    layer_s: Sequence[float]
    exposed_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Replan:
    """Other cuts are worth it; they save `gain_s` per step by what was measured.

    `slowness` is how many times longer than it should the device of each stage takes for each layer.
    """

    cuts: tuple[int, ...]
    why: str
    gain_s: float
    slowness: tuple[tuple[float, ...], ...] = ()

    def repays(self, moved_bytes: int, link: Link, rule: Rule) -> bool:
        """True if moving takes fewer seconds than are saved within the horizon.

        Args:
            moved_bytes: that would move.
            link: over which.
            rule: has the horizon.
        """
        return link.seconds(moved_bytes) < self.gain_s * rule.horizon_steps


class Trigger:
    """Follows the steps of a run; `home` is the plan that was planned or asked for.

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
        """`expected_s` are the seconds of each layer that the plan was made for, if it was made for any."""
        self.rule = rule
        self._expected = None if expected_s is None else np.maximum(expected_s, _LEAST_S)
        self._microbatches, self._synchronous = microbatches, synchronous
        self._skip = rule.skip_steps
        self._learned: list[Sequence[float]] = []
        self._window: deque[Seen] = deque(maxlen=rule.steps)
        self._plan: Plan | None = None
        self.home = Plan(())
        self._asked: tuple[int, ...] | None = None
        self._refused: set[tuple[int, ...]] = set()

    def observe(self, plan: Plan, seen: Seen) -> Replan | None:
        """Takes what a step under `plan` took; returns what to do about it, if anything."""
        if min(seen.layer_s) <= 0:  # a step in which not all layers ran
            return None
        self._follow(plan)
        if self._skip:
            self._skip -= 1
            return None
        if self._expected is None:
            self._learned.append(seen.layer_s)
            if len(self._learned) == self.rule.learn_steps:
                self._expected = np.maximum(np.median(self._learned, axis=0), _LEAST_S)
            return None
        if self._better(plan, seen) is None:
            self._window.clear()
            return None
        self._window.append(seen)
        if len(self._window) < self.rule.steps:
            return None
        seconds, exposed_s = (
            [getattr(s, name) for s in self._window] for name in ("layer_s", "exposed_s")
        )
        replan = self._better(
            plan, Seen(np.mean(seconds, axis=0).tolist(), np.mean(exposed_s, axis=0).tolist())
        )
        self._window.clear()
        self._asked = replan.cuts if replan else None
        return replan

    def refuse(self, cuts: tuple[int, ...]) -> None:
        """These cuts cannot be, or do not repay the way to them; not to be asked for again under this plan."""
        self._refused.add(cuts)

    def expect(self, cuts: tuple[int, ...]) -> None:
        """The plan that comes, instead of the cuts that were asked for, has these: it is no new home."""
        self._asked = cuts

    def _follow(self, plan: Plan) -> None:
        """A plan that was not asked for here is a new home."""
        if plan == self._plan:
            return
        if plan.cuts != self._asked:
            self.home = plan
        self._plan, self._asked = plan, None
        self._window.clear()
        self._refused.clear()

    def _better(self, plan: Plan, seen: Seen) -> Replan | None:
        """The cuts that this step asks for, if they gain enough."""
        expected, rule = self._expected, self.rule
        assert expected is not None
        slowness = self.slowness(plan, seen)
        by_layer = np.repeat(slowness, plan.cuts)
        own = np.array(seen.layer_s) / (expected * by_layer)
        own = np.where((own > rule.layer) | (own < 1 / rule.layer), own, 1.0)
        seconds = expected * own

        def step_s(cuts: Sequence[int]) -> float:
            parts_s = np.add.reduceat(seconds, np.cumsum([0, *cuts[:-1]])) * slowness + np.array(
                seen.exposed_s
            )
            return self._step_s(float(parts_s.max()), float(parts_s.sum()))

        at_home, total_s = plan.cuts == self.home.cuts, float(seconds.sum())
        no_less_s = self._step_s(
            total_s / sum(1 / f for f in slowness), total_s * min(slowness)
        )  # of any cuts
        if step_s(plan.cuts) - no_less_s <= (rule.gain if at_home else rule.gain_home) * step_s(
            plan.cuts
        ):
            return None
        cuts = tuple(cuts_at_speeds(seconds.tolist(), slowness, seen.exposed_s))
        at_home = step_s(cuts) >= step_s(self.home.cuts) * (1 - rule.gain)
        cuts = self.home.cuts if at_home else cuts
        gain_s = step_s(plan.cuts) - step_s(cuts)
        enough = gain_s > (rule.gain_home if at_home else rule.gain) * step_s(plan.cuts)
        if not enough or cuts == plan.cuts or cuts in self._refused:
            return None
        times = tuple(tuple((f * own).tolist()) for f in slowness)
        return Replan(cuts, self._why(plan, seen, at_home), gain_s, times)

    def _step_s(self, slowest_s: float, all_s: float) -> float:
        """A step's seconds: (M - 1) slowest + all with a flush, else M slowest, of M micro-batches."""
        return (self._microbatches - self._synchronous) * slowest_s + self._synchronous * all_s

    def slowness(self, plan: Plan, seen: Seen) -> list[float]:
        """The device of each stage, by how many times longer it takes than it should."""
        assert self._expected is not None
        ratio = np.array(seen.layer_s) / self._expected
        device = np.repeat([stage.devices[0] for stage in plan.stages], plan.cuts)
        slow = {
            d: _median(ratio[device == d], self._expected[device == d])
            for d in set(device.tolist())
        }
        return [slow[stage.devices[0]] for stage in plan.stages]

    def _why(self, plan: Plan, seen: Seen, at_home: bool) -> str:
        """The stage that is furthest from what was planned."""
        assert self._expected is not None
        starts = np.cumsum([0, *plan.cuts[:-1]])
        took_s = np.add.reduceat(np.array(seen.layer_s), starts) + np.array(seen.exposed_s)
        ratio = took_s / np.add.reduceat(self._expected, starts)
        stage = int(np.abs(np.log(ratio / np.median(ratio) if len(ratio) > 2 else ratio)).argmax())
        if at_home and np.all(ratio < self.rule.layer):
            return "every stage takes what was planned again"
        return f"stage {stage} takes {ratio[stage]:.1f} times what was planned"


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """The value below and above which lies half of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
