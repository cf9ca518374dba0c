"""The bytes that planners count with, against the buffer tables of lowered steps."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

import jax
import numpy as np
import pytest

from jvpipe.cost.costs import Costs, Shared
from jvpipe.cost.estimate import estimate
from jvpipe.cost.measure import measured_costs
from jvpipe.cost.model_costs import Work, costs_of, own_inputs
from jvpipe.cost.presets import PRESETS
from jvpipe.ir.buffers import Peak, peaks
from jvpipe.ir.fates import Fates
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, stage_cost
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import shared_store
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.schedules import find_schedule
from tests.cost.traces import MICROBATCHES, optimizer, programs, traced
from tests.grid import grid

NAMES = [
    "mlp",
    "pre-norm",
    "threefry",
    "resnet",
    "unet",
    "three-readers",
    "experts",
    "scanned",
    "with-aux",
    "linen",
    "unused",
]


def costs(name: str) -> Costs:
    signatures = [made.signature for made in programs(name)]
    works = [Work(1.0, 2.0)] * len(signatures)
    return costs_of(traced(name).graph, signatures, works, None, optimizer(name), MICROBATCHES)


def even_plan(layers: int, stages: int) -> Plan:
    each, more = divmod(layers, stages)
    return Plan.from_cuts([each + (s < more) for s in range(stages)])


def shares(
    problem: Problem, decision: Decision, devices: Sequence[Peak]
) -> tuple[list[float], float]:
    """What planners count for each stage, and for the plan's fullest device, in units of what the
    table holds.
    """
    counted = [stage.peak_bytes for stage in evaluate_decision(problem, decision).stages]
    by_stage = [count / peak.bytes for count, peak in zip(counted, devices, strict=True)]
    return by_stage, max(counted) / max(peak.bytes for peak in devices)


@pytest.mark.parametrize(
    ("name", "schedule"),
    grid(
        product(NAMES, ("gpipe", "1f1b")),
        *product(NAMES[1::3], ("1f1b",)),
        ("pre-norm", "gpipe"),
        ("unet", "gpipe"),
    ),
)
def test_no_stage_holds_more_than_planners_count_and_the_fullest_hardly_less(
    name: str, schedule: str
) -> None:
    model, found = traced(name), costs(name)
    layers = len(model.graph.layers)
    rng = np.random.default_rng(0)
    for stages in range(1, min(4, layers) + 1):
        others = np.sort(rng.choice(np.arange(1, layers), stages - 1, replace=False)).tolist()
        for bounds in ([0, *accumulate(even_plan(layers, stages).cuts)], [0, *others, layers]):
            plan = Plan.from_cuts([b - a for a, b in pairwise(bounds)])
            problem = Problem(found, stages, find_schedule(schedule), MICROBATCHES)
            lists = problem.schedule.lists(stages, MICROBATCHES)
            layouts = [
                MicrobatchLayout.of(model.graph, plan, [made.signature for made in programs(name)])
            ] * MICROBATCHES
            step = lower_step(model.graph, layouts, lists, optimizer(name))
            by_stage, share = shares(
                problem, Decision.keeping_all(bounds), peaks(step, stages)[:stages]
            )
            assert min(by_stage) >= 1, (bounds, by_stage)
            # gradients are counted from the start, but a layer's begin with its own backward
            assert share <= (1.11 if schedule == "gpipe" or stages == 1 else 1.16), (bounds, share)


@pytest.mark.parametrize("whole", [False, True], ids=["values", "whole layers"])
@pytest.mark.parametrize(
    "name", grid(["pre-norm", "threefry", "unet", "resnet", "linen"], "pre-norm", "resnet")
)
def test_plans_with_fates_are_counted_as_closely(name: str, whole: bool) -> None:
    """GPipe's cotangents pile up on a slow stage: where little else is held, up to 7% more than is
    counted.
    """
    model, rng = traced(name), random.Random(0)
    model = replace(model, graph=replace(model.graph, whole_layers=whole))
    layers = len(model.graph.layers)
    guessed = estimate(model, PRESETS["cpu"], optimizer(name), MICROBATCHES)
    # Buffer tables know nothing of what a program needs for itself, nor of what it computes again.
    # But a forward that runs again has buffers.
    options = [
        [option if whole else replace(option, extra_bytes=0) for option in layer.options]
        for layer in guessed.layers
    ]
    works, signatures = [Work(1.0, 2.0)] * layers, [made.signature for made in programs(name)]
    found = costs_of(model.graph, signatures, works, options, optimizer(name), MICROBATCHES)
    for stages, schedule in product(range(1, min(4, layers) + 1), ("gpipe", "1f1b")):
        choices = tuple(rng.randrange(len(layer.options)) for layer in found.layers)
        decision = Decision((0, *accumulate(even_plan(layers, stages).cuts)), choices)
        problem = Problem(found, stages, find_schedule(schedule), MICROBATCHES)
        plan = decision.plan(problem, "random")
        made = layer_programs(shared_store(), model, Fates.of(model.graph, plan))
        lists = problem.schedule.lists(stages, MICROBATCHES)
        layouts = [
            MicrobatchLayout.of(model.graph, plan, [p.signature for p in made])
        ] * MICROBATCHES
        step = lower_step(model.graph, layouts, lists, optimizer(name))
        *devices, host = peaks(step, stages)
        by_stage, share = shares(problem, decision, devices)
        assert min(by_stage) >= (0.93 if schedule == "gpipe" else 0.98), (stages, by_stage)
        # Inputs that only a forward reads again count for layers that keep everything, too.
        assert share <= (1.2 if whole else 1.16), (stages, schedule, share)
        assert host.bytes <= sum(
            stage.host_bytes for stage in evaluate_decision(problem, decision).stages
        )


@pytest.mark.parametrize("name", grid(["mlp", "pre-norm"], "mlp"))
def test_with_the_temporaries_of_programs_too(name: str) -> None:
    model, devices = traced(name), tuple(jax.devices()[:2])
    found = measured_costs(
        model, devices[0], shared_store(), optimizer(name), MICROBATCHES, fates=False
    )
    layers = len(model.graph.layers)
    order = find_schedule("1f1b")
    compiled = CompiledPlan(
        model, even_plan(layers, 2), order, optimizer(name), MICROBATCHES, devices, shared_store()
    )
    problem = Problem(found, 2, order, MICROBATCHES)
    bounds = [0, *accumulate(compiled.plan.cuts)]
    for s, peak in enumerate(compiled.peaks[:2]):
        counted = stage_cost(problem, s, bounds[s], bounds[s + 1], (0,) * layers).peak_bytes
        assert peak.bytes <= counted <= 1.15 * peak.bytes


def test_a_tied_parameter_is_shared_and_each_reader_has_an_accumulator() -> None:
    graph, found = traced("pre-norm").graph, costs("pre-norm")
    (tied,) = graph.tied()
    assert Shared(tied.readers, tied.array.bytes, per_version=True) in found.shared
    for layer in graph.layers:
        read = [graph.parameters[p] for p in layer.reading(ValueKind.PARAMETER)]
        own = sum(p.array.bytes for p in read if len(p.readers) == 1)
        assert found.layers[layer.id].parameter_bytes == own
        extra = 4 * MICROBATCHES if layer.id == graph.loss_layer else 0
        assert found.layers[layer.id].gradient_bytes == sum(p.array.bytes for p in read) + extra
    # Adam has two moments per parameter, beside its count.
    moments = found.layers[tied.owner].optimizer_bytes - 2 * sum(
        graph.parameters[p].array.bytes for p in graph.owned(tied.owner)
    )
    assert 0 <= moments <= 16


def test_a_tensor_that_two_backwards_read_is_held_once() -> None:
    graph, found = traced("three-readers").graph, costs("three-readers")
    inputs = own_inputs(graph, [made.signature for made in programs("three-readers")])
    alone = {t for tensors in inputs for t in tensors}
    together = [
        shared for shared in found.shared if not shared.per_version and len(shared.layers) > 1
    ]
    assert alone
    assert together
    for t, tensor in enumerate(graph.tensors):
        holders = [
            s
            for s in together
            if set(s.layers) <= {tensor.producer, *tensor.readers} and s.bytes == tensor.array.bytes
        ]
        assert not (t in alone and len(tensor.readers) > 1 and holders)
    for layer, tensors in zip(found.layers, inputs, strict=True):
        assert layer.input_bytes == sum(graph.tensors[t].array.bytes for t in tensors)


def test_edges_are_the_tensors() -> None:
    graph, found = traced("integers").graph, costs("integers")
    assert [(e.producer, e.readers, e.bytes) for e in found.edges] == [
        (t.producer, t.readers, t.array.bytes) for t in graph.tensors
    ]
    assert {e.differentiable for e in found.edges} == {True, False}
    assert len({e.name for e in found.edges}) == len(found.edges)
