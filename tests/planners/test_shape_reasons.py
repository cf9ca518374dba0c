"""Why places have several devices: named by their stages, and "because" only where fewer are slower."""

from dataclasses import replace

import pytest

from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.shape_reasons import shape_reasons, shape_words
from jvpipe.schedules.interleaved import Interleaved
from tests.planners.joint.shapes import chain, flat, layer, shapes_of

COSTS = chain([layer(1.0, parameters=10**6)] * 4, [8] * 3, batch=2)


def told(shapes: Shapes, places: tuple[tuple[int, ...], ...]) -> list[str]:
    """What is said of a shape whose stages have equally many layers."""
    problem = shapes.problem(Shape(places, 2))
    each = 4 // problem.stages
    decision = Decision.keeping_all(tuple(range(0, 5, each)))
    return shape_reasons(shapes, problem, decision, {})


@pytest.mark.parametrize(
    ("bytes_per_s", "reason"),
    [(1e12, "stage 0 has 2 devices because with 1 a"), (1e3, "stage 0 has 2 devices; with 1 a")],
)
def test_fewer_devices_are_a_reason_only_if_a_step_takes_longer(
    bytes_per_s: float, reason: str
) -> None:
    """On the slow link, adding up gradients takes longer than one device needs for all examples."""
    (line,) = told(shapes_of(COSTS, flat(3, bytes_per_s), 8), ((0, 1), (2,)))
    assert line.startswith(f"{reason} step would take ")
    assert line.endswith("ms, not longer") == ("because" not in line)


def test_a_place_with_chunks_is_named_by_its_stages() -> None:
    shapes = shapes_of(COSTS, flat(3, 1e12), 8)
    model = replace(shapes.model, schedule=Interleaved(chunks=2), stages=2)
    chunked = replace(shapes, model=model)
    (line,) = told(chunked, ((0, 1), (2,)))
    assert line.startswith("stages 0 and 2 have 2 devices because with 1 a step would take ")
    straight = chunked.problem(Shape(((0,), (1,)), 2))
    assert shape_words(straight) == "straight, 4 stages on 2 devices"
    assert shape_words(shapes.problem(Shape(((0,), (1,)), 2))) == "straight, 2 stages of one device"
