"""The parts of experiments/max_batch that its tables rest on."""

from dataclasses import replace

import jax
import pytest

from experiments.max_batch.largest import largest
from experiments.max_batch.rules import believed, keeping_all
from experiments.max_batch.saved import saving_operands
from experiments.max_batch.subjects import CLUSTER, between
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.estimate import estimate
from jvpipe.models import load
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.programs.store import ProgramStore
from jvpipe.schedules import find_schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.model import trace_model


def traced(size: int, **options: int) -> Traced:
    workload = load("bert", "large", **options)
    params = jax.eval_shape(workload.init, jax.random.key(0))
    return trace_model(
        workload.loss_fn, params, workload.abstract_batch(size), jax.random.key(0)
    ).traced


@pytest.mark.thorough
def test_saved_operands_are_the_bytes_of_korthikanti() -> None:
    """Equation 2 of arXiv:2205.05198, 34 s b h + 5 a s^2 b bytes in 16 bits: all but the masks
    double in 32.
    """
    s, b, h, a = 32, 3, 64, 4
    model = traced(b, tokens=s, width=h, heads=a, blocks=3)
    costs = estimate(saving_operands(model), CLUSTER, store=ProgramStore())
    attention, feed_forward = (
        costs.layers[i].options[0].kept_bytes + costs.layers[i].input_bytes for i in (3, 4)
    )
    values, masks = 32 * s * b * h + 4 * a * s * s * b, 2 * s * b * h + a * s * s * b
    assert attention + feed_forward == 2 * values + masks
    plain = estimate(model, CLUSTER, store=ProgramStore())
    assert plain.layers[3].options[0].kept_bytes < costs.layers[3].options[0].kept_bytes


@pytest.mark.thorough
def test_costs_lie_on_the_line_between_two_sizes() -> None:
    at = {
        size: estimate(traced(size, tokens=32, width=64, heads=4, blocks=2), CLUSTER)
        for size in (4, 6, 16)
    }
    found = between(at[4], at[16], (6 - 4) / (16 - 4))
    for mine, true in zip(found.layers, at[6].layers, strict=True):
        known = {tuple(option.fates.items()): option for option in true.options}
        assert len(mine.options) >= 0.5 * len(true.options)
        for option in mine.options:
            same = known.get(tuple(option.fates.items()))
            assert same is None or same.kept_bytes == option.kept_bytes
        assert mine.parameter_bytes == true.parameter_bytes
        assert mine.input_bytes == true.input_bytes
    assert [edge.bytes for edge in found.edges] == [edge.bytes for edge in at[6].edges]
    assert [(x.layers, x.bytes) for x in found.shared] == [
        (x.layers, x.bytes) for x in at[6].shared
    ]


def small() -> Problem:
    again = (Option(100), Option(0, extra_s=1.0, extra_bytes=100))
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, again, 10, 10, 20, 5, 7 + i) for i in range(6))
    edges = tuple(Edge(i, (i + 1,), 5) for i in range(5))
    return Problem(Costs(layers, edges, (Shared((0, 5), 3),)), 2, find_schedule("pipedream"), 2)


def test_where_nothing_may_be_dropped_planners_drop_nothing() -> None:
    problem = small()
    kept = replace(problem, costs=keeping_all(problem.costs))
    plan = Decision.keeping_all((0, 2, 6))
    peaks = [stage.peak_bytes for stage in evaluate_decision(problem, plan).stages]
    assert [stage.peak_bytes for stage in evaluate_decision(kept, plan).stages] == peaks
    for planner, limit in (("vpipe", max(peaks)), ("dawnpiper", 850), ("jvpipe", max(peaks))):
        decision = find_planner(planner).decide(replace(kept, memory_limit_bytes=limit))
        bare = Decision.keeping_all(decision.bounds)
        assert evaluate_decision(problem, bare).peak_bytes <= limit


def test_what_the_papers_believe() -> None:
    """On stage 0 of 2, with two versions and two micro-batches in flight."""
    problem, plan = small(), Decision.keeping_all((0, 2, 6))
    truth, vpipe, dawnpiper = (
        evaluate_decision(believed(problem, planner), plan).stages[0].peak_bytes
        for planner in ("jvpipe", "vpipe", "dawnpiper")
    )
    assert truth == evaluate_decision(problem, plan).stages[0].peak_bytes
    assert vpipe == truth - 8  # the most that one of its layers needs while it runs
    assert dawnpiper == truth + 2 * 30  # gradients and optimizer state of two layers once more
    assert believed(replace(problem, memory_limit_bytes=1), "pipedream").memory_limit_bytes is None


@pytest.mark.parametrize("near", [1, 5, 40, 3000])
@pytest.mark.parametrize("most", [0, 1, 7, 64, 130, 5000])
def test_largest_is_found_from_anywhere(near: int, most: int) -> None:
    found = largest(lambda size: size <= most, near)
    sizes = [n for n in range(1, 4096) if n <= 64 or n % 2 ** (n.bit_length() - 6) == 0]
    assert found == max((n for n in sizes if n <= most), default=0)
