"""The ways of the table on a few layers that cannot all be kept."""

from experiments.adapipe.run import GROUP, WAYS, cells, grouped
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule


def test_choosing_what_to_recompute_is_faster_than_all_or_nothing() -> None:
    options = (
        Option(8),
        Option(4, extra_s=0.2, extra_bytes=4),
        Option(0, extra_s=1.0, extra_bytes=8),
    )
    seconds = (1.0,) * 8 + (2.0,)
    layers = tuple(LayerCost("layer", s, 2 * s, options, input_bytes=1) for s in seconds)
    problem = Problem(Costs(layers), 3, find_schedule("1f1b"), 6, memory_limit_bytes=60)
    found = dict(zip(WAYS, cells(problem), strict=True))
    assert found["even, all kept"] == "does not fit"
    assert found["even, all again"] == "114.00 (1.00x)"
    speeds = [float(found[name].split("(")[1].rstrip("x)")) for name in list(WAYS)[2:]]
    assert speeds == sorted(speeds)
    assert speeds[-1] > speeds[0] > 1.1


def test_a_group_is_a_device() -> None:
    one = find_cluster("a100-80gb")
    whole = grouped(one)
    assert whole.device.memory_bytes == GROUP * one.device.memory_bytes
    assert whole.device.products_per_s("bfloat16") == GROUP * one.device.products_per_s("bfloat16")
    assert whole.way([0], [1]) == one.network
