"""PipeDream's dynamic program with replicas: equal to trying every pipeline."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.papers.replication import replicated
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import crossing_bytes, stage_cost
from jvpipe.schedules import find_schedule

DEVICE = Accelerator("device", 1, 1.0, {})
Stages = tuple[tuple[int, int, int], ...]  # begin, end, replicas


def problem_of(layers: list[LayerCost], devices: int, sizes: list[int], **more: Any) -> Problem:
    edges = tuple(Edge(i, (i + 1,), size) for i, size in enumerate(sizes))
    return Problem(Costs(tuple(layers), edges), devices, find_schedule("pipedream"), 8, **more)


def cluster(devices_per_machine: int, machines: int, peer: float, network: float) -> Cluster:
    return Cluster(
        "cluster", DEVICE, devices_per_machine, machines, peer=Link(peer), network=Link(network)
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(2, 5))
    number = st.integers(0, 9)
    state = (
        random.getstate()
    )  # checked annotations look at random elements, which hypothesis does not like here
    layers = [
        LayerCost(
            f"layer{i}",
            draw(number) + 1.0,
            2.0,
            (Option(draw(number)),),
            parameter_bytes=10 * draw(number),
        )
        for i in range(n)
    ]
    sizes = [draw(number) for _ in range(n - 1)]
    machines, each = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (1, 3)]))
    if machines * each > n:
        machines, each = 1, 2
    link = st.sampled_from([2.0, 10.0, 50.0])
    problem = problem_of(
        layers, machines * each, sizes, peer=Link(draw(link)), peer_uses_host=False
    )
    if draw(st.booleans()):
        problem = replace(problem, cluster=cluster(each, machines, draw(link), draw(link)))
    random.setstate(state)
    return problem


def levels(problem: Problem) -> list[tuple[int, int, Link]]:
    """Parts, devices of each, link; the innermost level first."""
    if problem.cluster is None:
        return [(problem.stages, 1, problem.peer)]
    each = min(problem.stages, problem.cluster.devices_per_machine)
    machines = problem.stages // each
    return [(each, 1, problem.cluster.peer), (machines, each, problem.cluster.network)]


def pipelines(
    problem: Problem, k: int, i: int, j: int, behind: Fraction
) -> Iterator[tuple[float, Stages, int]]:
    """Every pipeline for layers [i, j) over a part of level k: slowest seconds, stages, bytes of
    the fullest device.
    """
    if k == 0:
        count = math.ceil(1 + behind)
        same = replace(problem, cluster=None)
        peak = stage_cost(
            same, problem.stages - count, i, j, [0] * len(problem.costs.layers)
        ).peak_bytes
        yield sum(x.forward_s + x.backward_s for x in problem.costs.layers[i:j]), ((i, j, 1),), peak
    else:
        yield from splits(problem, k, i, j, behind, levels(problem)[k - 1][0])


def splits(
    problem: Problem, k: int, i: int, j: int, behind: Fraction, m: int
) -> Iterator[tuple[float, Stages, int]]:
    """Those over the first m parts of a level."""
    parts, devices, link = levels(problem)[k - 1]
    for last in range(1, m + 1):
        shared_behind = (behind + (parts - m) * devices) / last
        for begin in [i] if last == m else range(i + 1, j):
            weights = sum(x.parameter_bytes for x in problem.costs.layers[begin:j])
            there, back, _ = crossing_bytes(problem, begin, j)
            for inner_s, inner, inner_peak in pipelines(problem, k - 1, begin, j, shared_behind):
                stage_s = max(inner_s, link.seconds(2 * (last - 1) * weights)) / last
                stages = tuple((a, b, replicas * last) for a, b, replicas in inner)
                if last == m:
                    yield stage_s, stages, inner_peak
                    continue
                slow = max(stage_s, link.seconds(there) + link.seconds(back))
                for before_s, before, peak in splits(problem, k, i, begin, behind, m - last):
                    yield max(slow, before_s), (*before, *stages), max(peak, inner_peak)


def every(problem: Problem) -> list[tuple[float, Stages, int]]:
    return list(pipelines(problem, len(levels(problem)), 0, len(problem.costs.layers), Fraction(0)))


def stages_of(problem: Problem) -> Stages:
    decision = replicated(problem)
    assert decision is not None
    assert sum(decision.replicas) == problem.stages
    return tuple(zip(decision.bounds, decision.bounds[1:], decision.replicas, strict=False))


@settings(max_examples=25, deadline=None)
@given(problems())
def test_no_pipeline_is_faster(problem: Problem) -> None:
    cost_of: dict[Stages, float] = {}
    for seconds, stages, _ in every(problem):
        cost_of[stages] = min(seconds, cost_of.get(stages, math.inf))
    assert cost_of[stages_of(problem)] == pytest.approx(min(cost_of.values()))


@settings(max_examples=25, deadline=None)
@given(problems(), st.floats(0.2, 1.1))
def test_no_pipeline_that_fits_is_faster(problem: Problem, part: float) -> None:
    possible = every(problem)
    limit = int(part * max(peak for _, _, peak in possible))
    fitting = [(seconds, stages) for seconds, stages, peak in possible if peak <= limit]
    problem = replace(problem, memory_limit_bytes=limit)
    if fitting:
        ours = stages_of(problem)
        assert min(seconds for seconds, stages in fitting if stages == ours) == pytest.approx(
            min(fitting)[0]
        )
    else:
        assert replicated(problem) is None


def test_convolutions_are_replicated_and_the_dense_layer_is_not() -> None:
    convolutions = [LayerCost("convolution", 1.0, 2.0, (Option(8),))] * 3
    dense = LayerCost("dense", 0.5, 0.5, (Option(8),), parameter_bytes=1000)
    decision = replicated(problem_of([*convolutions, dense], 4, [1, 1, 1], peer=Link(100.0)))
    assert decision == ((0, 3, 4), (3, 1))


def test_gradients_are_summed_inside_machines_and_activations_cross_the_network() -> None:
    layers = [LayerCost("layer", 1.0, 2.0, (Option(8),), parameter_bytes=100)] * 4
    problem = problem_of(layers, 4, [1, 1, 1], cluster=cluster(2, 2, peer=1000.0, network=10.0))
    decision = replicated(problem)
    assert decision == ((0, 2, 4), (2, 2))


def test_devices_fill_machines() -> None:
    layers = [LayerCost("layer", 1.0, 2.0, (Option(8),))] * 6
    for devices in (3, 6):
        with pytest.raises(
            ValueError, match=f"{devices} devices: cluster cluster has 2 machines of 2"
        ):
            replicated(problem_of(layers, devices, [1] * 5, cluster=cluster(2, 2, 10.0, 10.0)))
