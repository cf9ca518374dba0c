"""An order of tasks is told beside 1F1B, and what keeps steps apart by name."""

from dataclasses import replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.order_reasons import order_reasons
from jvpipe.schedules import find_schedule

LAYER = LayerCost("block", 0.5, 1.0, (Option(1024),), split=SplitCost(0.5, 0.5, 0, 0))
EDGES = tuple(Edge(i, (i + 1,), 0) for i in range(3))
PROBLEM = Problem(Costs((LAYER,) * 4, EDGES), 2, find_schedule("zb-h1"), microbatches=4)
PLAN = Decision.keeping_all([0, 2, 4])


def test_a_gain_is_told_in_seconds_idle_time_transfers_and_bytes() -> None:
    (line,) = order_reasons(PROBLEM, PLAN, ())
    # 3 M + S - 1 = 13 s and (M + S - 1) 3 = 15 s, of which each device works 12 s
    assert "13000.00 ms, 0.87 of 1f1b's" in line
    assert "idle for 8% of it (20%)" in line
    assert "holds 4.00 KiB (4.00 KiB)" in line


def test_an_optimizer_that_needs_a_value_of_all_layers_is_named() -> None:
    _, line = order_reasons(PROBLEM, PLAN, ("clip_by_global_norm",))
    assert line.startswith("steps do not overlap: clip_by_global_norm needs a value of all layers")
    assert line.endswith("some 12000.00 ms")


def test_nothing_is_told_of_one_device_or_of_what_has_no_seconds() -> None:
    alone = replace(PROBLEM, stages=1)
    assert order_reasons(alone, Decision.keeping_all([0, 4]), ()) == []
    layers = tuple(replace(layer, forward_s=0.0, backward_s=0.0) for layer in PROBLEM.costs.layers)
    assert order_reasons(replace(PROBLEM, costs=Costs(layers, EDGES)), PLAN, ()) == []
