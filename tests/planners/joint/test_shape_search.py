"""Shapes that are worth a plan: as good as anything there is on small models, and no worse than the
papers' plans.
"""

import random
from statistics import median

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.papers.asking import ask_shapes
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.rough_plan import of_each_kind
from jvpipe.planners.joint.shape_search import rough_plans
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.shapes import Path, Shape
from tests.grid import grid
from tests.planners.joint.shapes import (
    GPU,
    best_s,
    chain,
    every_path,
    flat,
    layer,
    shapes_of,
    step_s,
)

CLUSTERS = (
    flat(4, 20.0),
    flat(3, 200.0),
    Cluster("two", GPU, 2, 2, peer=Link(200.0), network=Link(20.0)),
)


def test_uniform_layers_on_fast_links_are_data_parallel() -> None:
    shapes = shapes_of(chain([layer(1.0, 1000)] * 12, [1000] * 11), flat(8, 1e9), 64)
    assert rough_plans(shapes)[0].shape.replicas == (8,)


def test_large_parameters_at_the_end_and_slow_links_leave_the_last_layers_alone() -> None:
    # VGG-19 in short: convolutions that compute, with few parameters and falling activations; 400
    # MB of dense layers
    convolutions = [layer(0.0001, 4_000_000) for _ in range(16)]
    sizes = [*(12_000_000 >> (i // 3) for i in range(15)), 100_000]
    dense = [layer(0.00001, 400_000_000), layer(0.00001, 64_000_000), layer(0.00001, 16_000_000)]
    costs = chain([*convolutions, *dense], [*sizes, 16_000, 16_000])
    plans = rough_plans(shapes_of(costs, flat(16, 1.25e9 * 0.8), 2048))
    assert plans[0].shape.replicas == (15, 1)
    assert plans[0].decision.bounds[1] == 16
    assert of_each_kind(plans)["data parallel"].step_s > plans[0].step_s


@pytest.mark.parametrize("seed", grid(range(5), 1))
def test_small_models_get_shapes_as_good_as_anything_there_is(seed: int) -> None:
    draw, ratios = random.Random(seed), []
    for _ in range(12):
        layers = [
            layer(draw.uniform(0.5, 2.0), draw.randint(0, 60), draw.randint(1, 9)) for _ in range(4)
        ]
        cluster, limit = draw.choice(CLUSTERS), draw.choice((None, 400))
        costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
        shapes = shapes_of(costs, cluster, draw.choice((6, 8)), limit)
        planned = ask_shapes("jvpipe", shapes)
        assert planned.step_s <= rough_plans(shapes)[0].step_s * (1 + 1e-9)
        ratios.append(planned.step_s / best_s(shapes))
    assert median(ratios) <= 1 + 1e-9
    assert max(ratios) <= 1.03


def test_many_devices_are_planned_in_units() -> None:
    cluster = Cluster("many", GPU, 8, 32, peer=Link(1e6), network=Link(1e5))
    shapes = shapes_of(chain([layer(1.0, 10)] * 4, [1000] * 3), cluster, 256)
    assert sum(rough_plans(shapes)[0].shape.replicas) == 256


def test_no_plan_is_slower_than_plain_shapes_and_the_papers_plans() -> None:
    draw = random.Random(2)
    for _ in range(3):
        layers = [layer(draw.uniform(0.5, 2.0), draw.randint(0, 60)) for _ in range(10)]
        cluster = Cluster("two", GPU, 4, 2, peer=Link(100.0), network=Link(30.0))
        costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
        shapes = shapes_of(costs, cluster, 16)
        best, segments = ask_shapes("jvpipe", shapes).step_s, LocalSegments(shapes)
        one_each = tuple((d,) for d in range(8))
        paths: list[Path] = [(Shape(one_each, size), (0, *range(3, 10), 10)) for size in (1, 2, 4)]
        paths += [(Shape((tuple(range(8)),), size), (0, 10)) for size in (16, 8)]
        for planner in ("pipedream", "dapple"):
            rule = find_planner(planner).shape_rule
            assert rule is not None
            found = (rule(segments, size) for size in shapes.sizes)
            paths += [path for path in found if path]
        assert all(best <= step_s(shapes, path) * (1 + 1e-9) for path in paths)


def test_the_best_of_other_kinds_are_near_the_best_there_are() -> None:
    layers = [layer(s, p) for s, p in ((1.0, 5), (2.0, 60), (1.0, 0), (0.5, 300))]
    shapes, best = shapes_of(chain(layers, [4, 8, 2]), flat(4, 50.0), 8), dict[str, float]()
    for path in every_path(shapes):
        kind = path[0].kind
        best[kind] = min(step_s(shapes, path), best.get(kind, float("inf")))
    kinds = of_each_kind(rough_plans(shapes))
    assert kinds.keys() == best.keys()
    assert all(kinds[kind].step_s <= 1.05 * best[kind] for kind in best)


def test_layers_run_again_where_nothing_fits_otherwise_and_else_the_bytes_are_named() -> None:
    costs = chain([layer(1.0, 10, 100)] * 4, [1] * 3)
    free = ask_shapes("jvpipe", shapes_of(costs, flat(2, 100.0), 4, 1_000))
    tight = ask_shapes("jvpipe", shapes_of(costs, flat(2, 100.0), 4, 250))
    assert set(free.decision.choices) == {0}
    assert set(tight.decision.choices) != {0}
    with pytest.raises(Infeasible) as caught:
        ask_shapes("jvpipe", shapes_of(costs, flat(2, 100.0), 4, 20))
    enough = caught.value.smallest_limit_bytes
    assert enough > 20
    ask_shapes("jvpipe", shapes_of(costs, flat(2, 100.0), 4, enough))


def test_a_shape_that_a_climb_passes_by_is_climbed_from_too() -> None:
    seconds = (1.6558, 1.2925, 1.2988, 0.8109, 1.0419, 1.4166)
    reduced, kept = (16, 6, 40, 29, 3, 7), (7, 6, 9, 5, 1, 3)
    layers = [layer(*each) for each in zip(seconds, reduced, kept, strict=True)]
    cluster = Cluster("one machine", GPU, 6, 1, peer=Link(200.0))
    shapes = shapes_of(chain(layers, [1, 4, 1, 5, 3]), cluster, 8)
    # Its slowest stage comes first, which the paths take for slower than it is.
    fastest = Shape(((0, 1, 2, 3), (4, 5)), 4), (0, 5, 6)
    assert rough_plans(shapes)[0].step_s <= step_s(shapes, fastest)
