"""Planners that decide how many devices each stage has, asked by name."""

import pytest

from jvpipe.papers.asking import ask_shapes
from jvpipe.papers.registry import shape_planners
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.joint.shapes import best_s, chain, flat, layer, shapes_of

LAYERS = [layer(s, p, 10) for s, p in ((1.0, 5), (2.0, 60), (1.0, 0), (0.5, 300))]
COSTS = chain(LAYERS, [4, 8, 2])


def small(limit: int | None = None) -> Shapes:
    """Four layers on four machines."""
    return shapes_of(COSTS, flat(4, 50.0), 8, limit)


@pytest.mark.parametrize("planner", shape_planners())
def test_answers_are_no_better_than_everything_there_is(planner: str) -> None:
    planned = ask_shapes(planner, small())
    assert planned.plan.planner == planner
    assert least_step_s(small()) <= best_s(small()) <= planned.step_s * (1 + 1e-9)
    kinds = planned.shapes.values()
    assert planned.step_s <= min(each.step_s for each in kinds) * (1 + 1e-9)


@pytest.mark.parametrize("planner", shape_planners())
def test_the_limit_that_is_named_would_do(planner: str) -> None:
    with pytest.raises(Infeasible) as refused:
        ask_shapes(planner, small(500))
    enough = refused.value.smallest_limit_bytes
    planned = ask_shapes(planner, small(enough))
    assert 500 < evaluate_decision(planned.problem, planned.decision).limit_bytes <= enough


@pytest.mark.parametrize("planner", shape_planners())
def test_of_unlike_limits_the_bytes_are_named_that_would_do_on_each(planner: str) -> None:
    limits = [500, 400, 300, 200]
    with pytest.raises(Infeasible, match=r"\d+ bytes more on each device") as refused:
        ask_shapes(planner, small().told_apart([()] * 4, limits, []))
    more = refused.value.smallest_limit_bytes - limits[0]
    assert f" {more} bytes more" in str(refused.value)
    ask_shapes(planner, small().told_apart([()] * 4, [limit + more for limit in limits], []))


def test_mistakes() -> None:
    pinned = shapes_of(COSTS, flat(4, 50.0), 8, pins=Pins(stages=2))
    decides = "planner 'pipedream' decides stages, replicas and cuts itself"
    with pytest.raises(ValueError, match=decides):
        ask_shapes("pipedream", pinned)
    many = r"5 devices: pipedream needs a piece .* the model has 4 pieces: use at most 4"
    with pytest.raises(ValueError, match=many):
        ask_shapes("pipedream", shapes_of(COSTS, flat(5, 50.0), 8))
