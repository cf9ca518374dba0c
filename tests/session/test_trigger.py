"""What asks for another plan and what does not, on seconds that are made up."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from jvpipe.cost.hardware import Link
from jvpipe.ir.plan import Plan
from jvpipe.planners.replanning import Replan, Rule, Seen, Trigger
from tests.grid import grid

MICRO = 4


@dataclass
class World:
    """Devices and layers with true seconds; tasks take within `noise` of them, a few of them a lot
    longer.
    """

    layer_s: Sequence[float]
    noise: float = 0.1
    outliers: float = 0.02
    seed: int = 0
    lag: int = 1  # steps until a plan that was asked for is there
    moves: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng(self.seed)

    def task_s(self, seconds: float) -> float:
        found = seconds * (1 + self._draw.uniform(-self.noise, self.noise))
        return float(
            found
            * (1 + (self._draw.gamma(2.0, 1.0) if self._draw.random() < self.outliers else 0.0))
        )

    def seen(self, plan: Plan, slow: Callable[[int, int], float]) -> Seen:
        layer_s = []
        for stage in plan.stages:
            for layer in stage.layers:
                true_s = self.layer_s[layer] * slow(layer, stage.devices[0])
                tasks = [
                    [self.task_s(true_s * share) for _ in range(MICRO)] for share in (1 / 3, 2 / 3)
                ]
                layer_s.append(sum(map(statistics.median, tasks)))
        return Seen(layer_s, [0.0] * len(plan.stages))

    def run(
        self, trigger: Trigger, plan: Plan, slow: Callable[[int, int, int], float], steps: int
    ) -> Plan:
        """`slow(step, layer, device)` is how many times longer a layer takes."""
        due: tuple[int, Plan] | None = None
        for step in range(steps):
            if due and due[0] == step:
                plan, due = due[1], None
            found = trigger.observe(
                plan, self.seen(plan, lambda layer, d, step=step: slow(step, layer, d))
            )
            if found and not due:
                self.moves.append((step, found.cuts, found.why))
                due = step + 1 + self.lag, Plan.from_cuts(found.cuts)
        return plan


def trigger_of(world: World, *, known: bool, synchronous: bool = True) -> Trigger:
    return Trigger(world.layer_s if known else None, MICRO, synchronous=synchronous)


def slowest_s(
    layer_s: Sequence[float], cuts: Sequence[int], slow: Callable[[int, int], float]
) -> float:
    bounds = np.cumsum([0, *cuts]).tolist()
    return max(
        sum(layer_s[i] * slow(i, d) for i in range(a, b))
        for d, (a, b) in enumerate(pairwise(bounds))
    )


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("known", grid([True, False], False))
@pytest.mark.parametrize("cuts", [(6, 6), (3, 3, 3, 3)])
def test_noise_moves_nothing(cuts: tuple[int, ...], *, known: bool, synchronous: bool) -> None:
    for seed in range(4):
        world = World([1.0] * 12, seed=seed)
        trigger = trigger_of(world, known=known, synchronous=synchronous)
        assert world.run(trigger, Plan.from_cuts(cuts), lambda *_: 1.0, 200).cuts == cuts
        assert world.moves == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("factor", grid([1.5, 2.0, 3.0], 1.5))
@pytest.mark.parametrize(("cuts", "device"), [((6, 6), 0), ((6, 6), 1), ((4, 4, 4, 4), 2)])
def test_a_slow_device_is_relieved_and_gets_its_layers_back(
    cuts: tuple[int, ...], device: int, factor: float, *, known: bool
) -> None:
    begin, end = 20, 60
    for seed in range(3):
        world = World([1.0] * sum(cuts), seed=seed)

        def slow(step: int, layer: int, d: int) -> float:
            return factor if d == device and begin <= step < end else 1.0

        plan = world.run(trigger_of(world, known=known), Plan.from_cuts(cuts), slow, 100)
        first, *_, last = world.moves
        assert first[0] == begin + 1, (
            "with one step of delay, the third slow step is the last under the old plan"
        )
        assert first[2].startswith(f"stage {device} takes ")
        others = slowest_s(world.layer_s, first[1], lambda _, d: factor if d == device else 1.0)
        ideal = sum(world.layer_s) / (len(cuts) - 1 + 1 / factor)
        assert others <= ideal + factor, "as near to the ideal as whole layers get"
        assert (plan.cuts, last[0]) == (cuts, end + 1)
        assert last[2] == "every stage takes what was planned again"
        assert len(world.moves) <= 3


def test_a_single_slow_step_moves_nothing() -> None:
    world = World([1.0] * 12, outliers=0.0)
    trigger = trigger_of(world, known=True)
    world.run(
        trigger,
        Plan.from_cuts([6, 6]),
        lambda step, _, d: 3.0 if d == 1 and step % 4 == 3 else 1.0,
        100,
    )
    assert world.moves == []


def test_where_all_devices_are_slow_there_is_nothing_to_gain() -> None:
    world = World([1.0] * 12)
    world.run(
        trigger_of(world, known=True),
        Plan.from_cuts([6, 6]),
        lambda step, *_: 2.0 if step > 20 else 1.0,
        100,
    )
    assert world.moves == []


def test_layers_that_are_slow_wherever_they_are_come_to_rest() -> None:
    """From one stage alone slow layers look like a slow device; once some have moved, they are
    known.
    """
    for layers in (range(6, 12), range(4), [3], [11, 5]):
        for seed in range(3):
            world = World([1.0] * 12, seed=seed)
            true_s = [2.5 if layer in layers else 1.0 for layer in range(12)]

            def slow(step: int, layer: int, d: int, true_s: list[float] = true_s) -> float:
                return true_s[layer] if 10 <= step < 150 else 1.0

            trigger = trigger_of(world, known=True)
            during = world.run(trigger, Plan.from_cuts([6, 6]), slow, 150)
            moves = len(world.moves)
            assert moves <= 3
            best = min(slowest_s(true_s, (n, 12 - n), lambda *_: 1.0) for n in range(1, 12))
            assert slowest_s(true_s, during.cuts, lambda *_: 1.0) <= best + 2.5
            after = world.run(trigger, during, lambda *_: 1.0, 20)
            assert after.cuts == (6, 6)
            assert len(world.moves) - moves <= 2


def test_seconds_that_were_planned_wrongly_are_corrected_at_once() -> None:
    world = World([1.0, 1.0, 1.0, 1.0, 4.0, 1.0])
    trigger = Trigger([1.0] * 6, MICRO, synchronous=True)
    assert world.run(trigger, Plan.from_cuts([3, 3]), lambda *_: 1.0, 100).cuts == (4, 2)
    assert len(world.moves) == 1


def test_time_that_copies_cost_is_the_stages_own() -> None:
    trigger, plan = Trigger([1.0] * 6, MICRO, synchronous=False), Plan.from_cuts([3, 3])
    seen = Seen([1.0] * 6, [2.0, 0.0])
    found = [trigger.observe(plan, seen) for _ in range(3)]
    assert found[:2] == [None, None]
    assert found[2]
    assert found[2].cuts == (2, 4)
    assert found[2].gain_s == pytest.approx(MICRO * (5.0 - 4.0))
    assert found[2].why == "stage 0 takes 1.7 times what was planned"


def test_a_plan_that_was_asked_for_is_at_home() -> None:
    """The way back is to what the user wanted last, also if other cuts are a little better."""
    world = World([1.0] * 100, noise=0.0, outliers=0.0)
    trigger = trigger_of(world, known=True)
    assert world.run(trigger, Plan.from_cuts([50, 50]), lambda *_: 1.0, 5).cuts == (50, 50)
    user = Plan.from_cuts([51, 49])
    assert (
        world.run(trigger, user, lambda step, _, d: 2.0 if d == 0 and step < 30 else 1.0, 60)
        == user
    )
    assert [cuts for _, cuts, _ in world.moves] == [(33, 67), (51, 49)]


def test_what_was_refused_is_not_asked_for_again() -> None:
    trigger, plan = Trigger([1.0] * 6, MICRO, synchronous=True), Plan.from_cuts([3, 3])
    seen = Seen([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [0.0, 0.0])
    found = [trigger.observe(plan, seen) for _ in range(3)][-1]
    assert found
    trigger.refused.add(found.cuts)
    assert [trigger.observe(plan, seen) for _ in range(10)] == [None] * 10


def in_a_loop(*cuts: int) -> Plan:
    """Two devices with two stages each."""
    return Plan.from_cuts(cuts).on([(0,), (1,), (0,), (1,)])


def test_devices_of_several_stages_are_as_slow_as_their_stages_together() -> None:
    trigger, seen = Trigger([1.0] * 8, MICRO, synchronous=True), Seen([1.0] * 8, [0.0] * 4)
    assert [trigger.observe(in_a_loop(3, 1, 1, 3), seen) for _ in range(6)] == [None] * 6
    trigger, layer_s = Trigger([1.0] * 8, MICRO, synchronous=True), [1.0, 1.0, 2.0, 2.0] * 2
    every = [trigger.observe(in_a_loop(2, 2, 2, 2), Seen(layer_s, [0.0] * 4)) for _ in range(3)]
    found = every[-1]
    assert found
    assert found.cuts == (3, 1, 3, 1)
    # two stages per device: the slowest device M - 1/2 times, and half of all stages
    assert found.gain_s == pytest.approx(3.5 * (8 - 6) + (12 - 10) / 2)


def test_a_step_in_which_not_every_layer_ran_says_nothing() -> None:
    trigger, plan = Trigger([1.0] * 2, MICRO, synchronous=True), Plan.from_cuts([1, 1])
    assert [trigger.observe(plan, Seen([1.0, 0.0], [0.0, 0.0])) for _ in range(10)] == [None] * 10


def test_a_migration_must_repay() -> None:
    found, rule = Replan((2, 4), "", 0.01), Rule(horizon_steps=100)
    assert found.repays(10**6, Link(1.1e6), rule)
    assert not found.repays(10**6, Link(0.9e6), rule)
