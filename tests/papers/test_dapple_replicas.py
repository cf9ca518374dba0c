"""DAPPLE's planner with replicas, beside every plan that its policies of placement can make."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.papers.dapple_policies import append_first, fresh_first, scatter_first
from jvpipe.papers.dapple_replicas import dapple_replicas, plan_latency_s
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from tests.papers.test_dapple import latency
from tests.planners.joint.shapes import GPU, chain, flat, layer, shapes_of, stages_of
from tests.planners.joint.shapes import step_s as simulated_s

TWO = Cluster("two", GPU, 2, 2, peer=Link(200.0), network=Link(20.0))
THREE = Cluster("three", GPU, 1, 3, network=Link(50.0))


def chosen(policy: str, used: set[int], each: int, devices: int, m: int) -> tuple[int, ...]:
    """The m devices that a policy picks, one after another, the lowest number of those that it
    likes as much.
    """
    begun, picked = {d // each for d in used}, list[int]()
    for _ in range(m):
        left = [d for d in range(devices) if d not in used and d not in picked]
        on = [d // each for d in picked]
        match policy:
            case "fresh":
                key = {d: (d // each in begun, d) for d in left}
            case "append":
                key = {d: (d // each not in begun, d) for d in left}
            case _:
                key = {
                    d: (bool(begun) and d // each not in begun, on.count(d // each), d)
                    for d in left
                }
        picked.append(min(left, key=lambda d: key[d]))
    return tuple(sorted(picked))


def placements(
    counts: tuple[int, ...], each: int, devices: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields the places of stages, under all compositions of the policies; the last stage has all
    that is left.
    """
    for policies in product(("fresh", "append", "scatter"), repeat=len(counts)):
        used, places = set[int](), []
        for policy, m in zip(policies, counts, strict=True):
            places.append(chosen(policy, used, each, devices, m))
            used |= set(places[-1])
        yield tuple(places)


def every_plan(shapes: Shapes, size: int) -> set[Path]:
    """All shapes with their bounds that the policies can make."""
    each, devices = shapes.cluster.devices_per_machine, shapes.devices
    plans = set()
    for stages in range(1, min(shapes.layers, devices) + 1):
        for inner in combinations(range(1, shapes.layers), stages - 1):
            for counts in product(range(1, min(devices, size) + 1), repeat=stages):
                if sum(counts) <= devices:
                    bounds = (0, *inner, shapes.layers)
                    every = placements(counts, each, devices)
                    plans |= {(Shape(places, size), bounds) for places in every}
    return plans


def step_s(shapes: Shapes, path: Path) -> float:
    """DAPPLE's latency of a plan, from layers and links."""
    costs, cluster, (shape, bounds) = shapes.local.costs[0], shapes.cluster, path
    stages = list[tuple[float, float, float]]()
    for s, ((i, j), places) in enumerate(zip(pairwise(bounds), shape.places, strict=True)):
        part = -(-shape.size // len(places))
        if s:
            crossing = float(
                sum(e.bytes for e in costs.edges if e.producer < i <= e.readers[0]) * shape.size
            )
            one_way_s = cluster.way(shape.places[s - 1], places).seconds(crossing)
            stages.append((one_way_s, one_way_s, 0.0))
        layers = costs.layers[i:j]
        gradients = float(sum(x.gradient_bytes for x in layers))
        reduce_s = cluster.reducing(places).seconds(gradients)
        stages.append(
            (
                part * sum(x.forward_s for x in layers),
                part * sum(x.backward_s for x in layers),
                reduce_s,
            )
        )
    return latency(stages, shapes.batch // shape.size)


def drawn(draw: random.Random, layers: int, limit: int | None = None) -> Shapes:
    """Some layers on two machines of two devices, or three of one."""
    every = [
        layer(draw.uniform(0.5, 2.0), draw.randint(1, 60), draw.randint(1, 9))
        for _ in range(layers)
    ]
    cluster = draw.choice((TWO, THREE))
    costs = chain(every, [draw.randint(1, 9) for _ in every[1:]])
    return shapes_of(costs, cluster, 12, limit)


def test_of_two_stages_the_least_latency_of_all_is_found_and_of_more_one_near_it() -> None:
    draw, over = random.Random(3), []
    for layers in (2, 2, 2, 2, 2, 4, 4, 4, 4, 4):
        shapes = drawn(draw, layers)
        for size in (12, 4):
            path, every = dapple_replicas(LocalSegments(shapes), size), every_plan(shapes, size)
            assert path is not None
            assert path in every
            mine = step_s(shapes, path)
            assert plan_latency_s(stages_of(shapes, path), 12 // size) == pytest.approx(mine)
            over.append(mine / min(step_s(shapes, each) for each in every))
    assert over[:10] == pytest.approx([1.0] * 10)
    assert 1 - 1e-9 <= min(over[10:]) <= max(over[10:]) < 1.2


def test_policies_choose_as_one_device_after_another_is_chosen() -> None:
    draw = random.Random(4)
    names = {fresh_first: "fresh", append_first: "append", scatter_first: "scatter"}
    for _ in range(60):
        each, machines = draw.choice(((4, 3), (8, 2), (2, 5)))
        used = {
            each * k + d
            for k in range(machines)
            for d in range(draw.choice((0, 0, draw.randint(0, each))))
        }
        free = tuple(each - sum(d // each == k for d in used) for k in range(machines))
        m = draw.randint(0, sum(free))
        for policy, name in names.items():
            taken = policy(free, (each,) * machines, m)
            wanted = chosen(name, used, each, each * machines, m)
            assert taken == tuple(sum(d // each == k for d in wanted) for k in range(machines))


def test_under_a_limit_plans_keep_it_or_there_is_none() -> None:
    draw, fitted = random.Random(5), 0
    for _ in range(8):
        shapes = drawn(draw, 4, draw.choice((40, 150, 600)))
        path = dapple_replicas(LocalSegments(shapes), 4)
        if path is not None:
            assert simulated_s(shapes, path) < float("inf")
            fitted += 1
    assert 0 < fitted < 8


def test_stages_with_large_activations_and_few_parameters_are_scattered() -> None:
    # a stage on both machines sums gradients over the network once, and its activations stay inside
    # machines
    cluster = Cluster("two", GPU, 2, 2, peer=Link(1e4), network=Link(100.0))
    shapes = shapes_of(chain([layer(1.0, 5000)] * 2, [500]), cluster, 64, 25_000)
    path = dapple_replicas(LocalSegments(shapes), 4)
    assert path is not None
    assert path[0].places == ((0, 2), (1, 3))


def test_the_last_stage_may_have_a_number_of_devices_that_no_other_may() -> None:
    """Of 17 devices other stages take an even number, so that an odd one is left.

    The second layer is fast on shares of three examples, for which 15 devices suffice.
    """
    batches, heavy_s = (3, 4, 45), (0.3, 3.0, 20.0)
    every = tuple(
        chain([layer(0.016), layer(forward_s)], [0], size).costs[0]
        for size, forward_s in zip(batches, heavy_s, strict=True)
    )
    shapes = shapes_of(LocalCosts(batches, every), flat(17, 1e6), 450)
    path = dapple_replicas(LocalSegments(shapes), 45)
    assert path is not None
    assert (path[0].replicas, path[1]) == ((2, 15), (0, 1, 2))
