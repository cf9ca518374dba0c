"""Shapes of pipelines: their names, the orders of their devices, and the problem that each of them
is.
"""

from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.model.problem import Group
from jvpipe.planners.model.shapes import Shape
from tests.planners.joint.shapes import GPU, chain, flat, layer, shapes_of

COSTS = chain([layer(1.0)] * 3, [8, 8])
SHAPES = shapes_of(COSTS, flat(4, 1e9), 12)


def test_orders_are_by_machine_and_across_machines() -> None:
    cluster = Cluster("two", GPU, 2, 2, peer=Link(8e9), network=Link(1e9))
    assert shapes_of(COSTS, cluster, 12).orders == ((0, 1, 2, 3), (0, 2, 1, 3))
    assert SHAPES.orders == ((0, 1, 2, 3),)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="use fewer devices"):
        replace(SHAPES, devices=5)
    with pytest.raises(ValueError, match="a batch of 0"):
        replace(SHAPES, batch=0)


def test_shapes_have_kinds() -> None:
    places = ((0, 1), (2,), (3,))
    assert [Shape(places[:s], 2).kind for s in (1, 2, 3)] == [
        "data parallel",
        "two stages",
        "hybrid",
    ]
    assert Shape(((0,), (1,)), 2).kind == "straight"


def test_the_problem_of_a_shape_has_its_groups_their_shares_and_their_links() -> None:
    problem = SHAPES.problem(Shape(((0, 1, 2), (3,)), 6))
    assert (problem.devices, problem.microbatches) == (2, 2)
    assert problem.where == ((0, 1, 2), (3,))
    assert problem.layers_on(0)[0].forward_s == 2.0  # two of six examples
    assert problem.layers_on(1)[0].forward_s == 6.0
    assert problem.link_into(1) == Link(1e9)
    assert problem.group(0).reduces.bytes_per_s == pytest.approx(1e9 * 3 / 4)


def test_a_group_is_as_slow_as_its_slowest_device_and_as_full_as_its_fullest() -> None:
    apart = (
        Group((0,)),
        Group((1,), (1.0, 2.0, 1.0)),
        Group((2,), (3.0, 1.0, 1.0), 5),
        Group((3,)),
    )
    shapes = replace(shapes_of(COSTS, flat(4, 1e9), 12, 100), apart=apart)
    problem = shapes.problem(Shape(((0, 1, 2), (3,)), 6))
    assert problem.slowness(0) == (3.0, 2.0, 1.0)
    assert (problem.limit_of(0), problem.limit_of(1)) == (95, 100)
    assert problem.limits == (95, 95, 95, 100)
