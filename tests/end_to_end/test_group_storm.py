"""Layers in groups under cuts, fates, places and moments of a move that chance drew: not a bit is
another.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import optax
import pytest

import jvpipe
from jvpipe.ir.layers import LayerGraph
from jvpipe.schedules import find_schedule
from jvpipe.trace.model import trace_model
from tests.bits import MICRO, batches_of, digest
from tests.end_to_end.test_fates import drawn
from tests.end_to_end.test_groups import NAMES, random_cuts
from tests.grid import grid
from tests.zoo import CASES

STEPS, DEVICES = 7, 3  # a stream that has forgotten where it came from is compiled once more
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "pipedream", "2bw")


@dataclass(frozen=True)
class Draw:
    """What chance drew for a run: a model, a schedule, and when its second plan takes over."""

    seed: int
    name: str
    schedule: str
    at: tuple[int, int]

    @staticmethod
    def of(seed: int) -> "Draw":
        """Returns what a seed leads to."""
        chance = random.Random(seed)
        at = chance.randrange(1, 3), chance.randrange(MICRO)
        return Draw(seed, chance.choice(NAMES), chance.choice(SCHEDULES), at)

    def plans(self, graph: LayerGraph) -> list[jvpipe.Plan]:
        """The plan at the beginning, and the one that layers move to."""
        chance = random.Random(self.seed)
        return [_placed(graph, chance) for _ in range(2)]

    def __str__(self) -> str:
        return f"{self.seed} {self.name} {self.schedule} {self.at[0]}.{self.at[1]}"


def _placed(graph: LayerGraph, chance: random.Random) -> jvpipe.Plan:
    """Draws cuts, a fate for each candidate, and a device for each stage."""
    seed, stages = chance.randrange(1000), chance.randint(1, DEVICES)
    plan = drawn(graph, random_cuts(len(graph.layers), stages, seed), seed)
    places = chance.sample(range(DEVICES), len(plan.stages))
    pairs = zip(plan.stages, places, strict=True)
    return replace(plan, stages=tuple(replace(stage, devices=(d,)) for stage, d in pairs))


@cache
def graph_of(name: str) -> LayerGraph:
    m = CASES[name]()
    return trace_model(m.loss_fn, m.params, m.batch, m.rng, m.state, **m.options).traced.graph


def run(one: Draw, plans: list[jvpipe.Plan], **options: Any) -> list[str]:
    """Returns digests of losses and parameters; groups, where asked for, are there at both ends of
    the run.
    """
    m = CASES[one.name]()
    first, *later = plans
    devices = jax.devices()[:DEVICES]
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optax.adamw(1e-2),
        first,
        MICRO,
        one.schedule,
        devices=devices,
        **m.options,
        **options,
    )
    batches = batches_of(m, STEPS)
    state, losses = pipe.init(m.params, batches[0], m.rng, m.state), []
    is_grouped = [pipe.session.compiled.grouped]
    for plan in later:
        state = pipe.migrate(state, plan, at=one.at)
    for batch in batches:
        pipe.session.grouping.wait()
        ((state, metrics),) = pipe.run(state, [batch])
        losses.append(digest(metrics["loss"]))
    is_grouped.append(pipe.session.compiled.grouped)
    assert is_grouped == [options.get("group", False)] * 2
    assert len(pipe.session.history) == len(later)
    return [*losses, digest(pipe.params(state)), digest(pipe.model_state(state))]


@cache
def on_one_device(name: str) -> list[str]:
    """A run that neither groups layers nor moves them; what it computes is what every synchronous
    schedule does.
    """
    whole = jvpipe.Plan.from_cuts([len(graph_of(name).layers)])
    return run(Draw(0, name, "gpipe", (0, 0)), [whole])


@pytest.mark.parametrize("one", grid(map(Draw.of, range(200)), Draw.of(0)), ids=str)
def test_no_draw_changes_a_bit(one: Draw) -> None:
    plans = one.plans(graph_of(one.name))
    is_synchronous = find_schedule(one.schedule).synchronous
    expected = on_one_device(one.name) if is_synchronous else run(one, plans)
    assert run(one, plans, group=True) == expected
