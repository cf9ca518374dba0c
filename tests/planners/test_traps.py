"""The traps of planning: what a simpler model of memory or time gets wrong."""

from dataclasses import replace

import pytest

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.hardware import Link
from jvpipe.planners.infeasible import Infeasible
from jvpipe.planners.jvpipe import jvpipe
from jvpipe.planners.memory import evaluate, stage_cost
from jvpipe.planners.problem import RERUN, RERUN_ON, Decision, Problem
from jvpipe.schedules import find_schedule

KEEP, SWAP, AGAIN = Option(100), Option(0, 100), Option(0, 0, 0.5, 100)


def problem(layers: int, stages: int, schedule: str = "1f1b", micro: int = 8, **changes: object) -> Problem:
    layer = replace(LayerCost("layer", 1.0, 2.0, (KEEP, SWAP, AGAIN)), **changes)
    return Problem(Costs((layer,) * layers), stages, find_schedule(schedule), micro, host=Link(1e3))


def peak(p: Problem, s: int, i: int, j: int, choice: int) -> int:
    return stage_cost(p, s, i, j, (choice,) * len(p.costs.layers)).peak_bytes


def test_swapped_bytes_stay_for_two_copies() -> None:
    gpipe = problem(1, 1, "gpipe", 8)
    assert [peak(gpipe, 0, 0, 1, choice) for choice in (0, 1)] == [800, 200]
    last = problem(2, 2)  # one micro-batch in flight on the last stage: nothing is saved
    assert peak(last, 1, 1, 2, 0) == peak(last, 1, 1, 2, 1) == 100
    for micro in (1, 2):
        with pytest.raises(Infeasible):  # as many copies as micro-batches
            jvpipe(replace(problem(1, 1, "gpipe", micro), memory_limit_bytes=99))


def test_the_layer_under_backward_adds_its_own_peak_once() -> None:
    p = problem(3, 1, micro=1, temporary_bytes=40)
    assert peak(p, 0, 0, 3, 0) == 300 + 40  # a maximum over layers, not a sum
    assert peak(p, 0, 0, 3, 2) == 100 + 40  # what one layer computes again is gone before the next does


def test_what_crosses_a_bound_counts_per_micro_batch_and_in_transit() -> None:
    p = problem(2, 2, "gpipe", 4, input_bytes=10)
    p = replace(p, costs=replace(p.costs, edges=(Edge(0, (1,), 10),)))
    held, transit = 4 * (100 + 10), 2 * 10  # the value itself and its cotangent
    assert peak(p, 1, 1, 2, 0) == held + transit


@pytest.mark.parametrize(
    ("schedule", "versions"), [("pipedream", [3, 2, 1]), ("pipedream-vertical-sync", [3, 3, 3]), ("2bw", [2, 2, 2])]
)
def test_versions_of_parameters_take_room(schedule: str, versions: list[int]) -> None:
    for s in range(3):
        with_parameters, without = (
            peak(problem(3, 3, name, parameter_bytes=1_000), s, s, s + 1, 0) for name in (schedule, "1f1b")
        )
        assert with_parameters - without == (versions[s] - 1) * 1_000


def test_a_value_of_several_readers_is_held_once_per_stage() -> None:
    p = problem(4, 2, "gpipe", 2)
    p = replace(p, costs=replace(p.costs, shared=(Shared((0, 1, 3), 7),)))
    assert peak(p, 0, 0, 2, 0) == 2 * (2 * 100 + 7)  # two readers here: one buffer
    assert peak(p, 1, 2, 4, 0) == 2 * (2 * 100 + 7)  # and a copy on the stage of the third


def test_recomputation_spans_layers() -> None:
    p = replace(problem(4, 1, "gpipe", 8, input_bytes=50), memory_limit_bytes=8 * 50 + 4 * 100 + 3 * 50)
    alone = stage_cost(p, 0, 0, 4, (2, 2, 2, 2))
    spanning = stage_cost(p, 0, 0, 4, (RERUN, RERUN_ON, RERUN_ON, RERUN_ON))
    assert alone.peak_bytes == 8 * 4 * 50 + 100  # every layer's input stays
    assert spanning.peak_bytes == 8 * 50 + 4 * 100 + 3 * 50  # the first one's alone; while they run, all residuals
    assert jvpipe(p).choices == (RERUN, RERUN_ON, RERUN_ON, RERUN_ON)


def test_recomputation_may_read_a_swapped_input() -> None:
    both = Option(0, 0, 0.5, 100, {}, swaps_input=True)
    p = problem(1, 1, "gpipe", 8, input_bytes=50)
    p = replace(p, costs=replace(p.costs, layers=(replace(p.costs.layers[0], options=(KEEP, AGAIN, both)),)))
    assert peak(p, 0, 0, 1, 2) == 2 * 50 + 100
    assert jvpipe(replace(p, memory_limit_bytes=200)).choices == (2,)


def test_points_inside_the_hull_are_chosen_where_they_fit_best() -> None:
    # Of (kept, seconds) the middle point lies above the line between its neighbours: no price picks it.
    layer = LayerCost("layer", 1.0, 2.0, (Option(100), Option(60, 0, 0.7), Option(0, 0, 1.0)))
    p = Problem(Costs((layer,)), 1, find_schedule("gpipe"), 1, memory_limit_bytes=60)
    assert evaluate(p, jvpipe(p)).stages[0].recompute_s == 0.7


def test_swaps_share_the_link_with_activations() -> None:
    edges = (Edge(0, (1,), 1_000),)
    p = problem(2, 2)
    p = replace(p, costs=replace(p.costs, edges=edges), peer=Link(1e3), peer_uses_host=True)
    assert stage_cost(p, 1, 1, 2, (1, 1)).link_s == pytest.approx(2 * 0.1 + 2 * 1.0)
    apart = replace(p, peer_uses_host=False)
    assert stage_cost(apart, 1, 1, 2, (1, 1)).link_s == pytest.approx(2 * 0.1)


def test_the_furthest_reach_is_not_always_right() -> None:
    """With sends, a stage that takes all it can may end where sending is dear: all reachable cuts are looked at."""
    seconds = [3.0, 1.0, 3.0, 1.0]
    layers = tuple(LayerCost(f"layer{i}", f, 0.0, (Option(0),)) for i, f in enumerate(seconds))
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 100), Edge(2, (3,), 1))
    p = Problem(Costs(layers, edges), 2, find_schedule("pipedream"), 8, peer=Link(10.0), peer_uses_host=False)
    assert jvpipe(p).bounds == (0, 1, 4)  # 3 and 5 seconds; at (0, 2, 4) the link would take 20
    assert evaluate(p, Decision.keeping_all((0, 2, 4))).bottleneck_s == 20.0
