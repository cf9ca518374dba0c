"""The traps of planning: what a planner that looks at too little gets wrong, each on a problem that
shows it.
"""

from dataclasses import replace
from typing import Any

import pytest

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, stage_cost
from jvpipe.schedules import find_schedule
from jvpipe.trace.model import trace_model
from tests.zoo import CASES

KEEP, SWAP = Option(100), Option(0, swapped_bytes=100)
AGAIN = Option(0, extra_s=1.0)


def one_stage(options: tuple[Option, ...], microbatches: int, limit: int, **more: Any) -> Problem:
    """A layer on a device, GPipe: so many micro-batches are in flight as there are."""
    layer = LayerCost("layer", 1.0, 2.0, options, **more)
    return Problem(Costs((layer,)), 1, find_schedule("gpipe"), microbatches, limit)


def best(problem: Problem) -> Decision:
    """The surrogate's optimum."""
    return jvpipe(problem, refine=False)


def peak_bytes(problem: Problem, decision: Decision) -> int:
    return evaluate_decision(problem, decision).peak_bytes


def test_swapping_saves_nothing_of_a_single_micro_batch() -> None:
    assert best(one_stage((KEEP, SWAP, AGAIN), 1, 99)).choices == (2,)  # recompute
    with pytest.raises(Infeasible):
        best(one_stage((KEEP, SWAP), 1, 99))


def test_two_swapped_micro_batches_of_many_are_on_the_device() -> None:
    assert best(one_stage((KEEP, SWAP, AGAIN), 8, 200)).choices == (1,)  # two of eight
    assert best(one_stage((KEEP, SWAP, AGAIN), 8, 199)).choices == (2,)


def test_the_layers_at_work_need_their_largest_peak_and_not_the_sum() -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(10),), temporary_bytes=size)
        for i, size in enumerate((50, 70))
    )
    problem = Problem(Costs(layers), 1, find_schedule("1f1b"), 4, 10 + 10 + 70)
    assert peak_bytes(problem, best(problem)) == 90
    with pytest.raises(
        Infeasible
    ) as raised:  # each layer is run again from its input, and has its residuals then
        best(replace(problem, memory_limit_bytes=79))
    assert raised.value.smallest_limit_bytes == 80


def test_what_recomputation_needs_while_it_runs_is_counted() -> None:
    again = Option(0, extra_s=0.5, extra_bytes=100)
    problem = one_stage((KEEP, again), 1, 100)
    assert best(problem).choices == (0,)  # recomputing what one micro-batch keeps saves nothing
    assert best(one_stage((KEEP, again), 2, 199)).choices == (1,)


def test_a_stages_input_is_held_for_every_micro_batch_in_flight() -> None:
    problem = one_stage((Option(0),), 8, 80, input_bytes=10)
    assert peak_bytes(problem, best(problem)) == 80
    with pytest.raises(Infeasible) as raised:
        best(replace(problem, memory_limit_bytes=79))
    assert raised.value.smallest_limit_bytes == 80


def test_an_input_can_be_swapped_too() -> None:
    options = (Option(0), Option(0, swaps_input=True))
    assert best(one_stage(options, 8, 20, input_bytes=10)).choices == (1,)


def test_values_arrive_early_and_cotangents_wait() -> None:
    """While the second stage has one micro-batch in flight the first has two; it may get a
    cotangent too soon.
    """
    layers = (LayerCost("a", 1.0, 2.0, (Option(1),)), LayerCost("b", 1.0, 2.0, (Option(1),)))
    for differentiable, peaks in ((True, [2 + 50, 1 + 50]), (False, [2, 1 + 50])):
        edge = Edge(0, (1,), 50, differentiable=differentiable)
        problem = Problem(Costs(layers, (edge,)), 2, find_schedule("1f1b"), 4, max(peaks))
        assert [
            stage.peak_bytes for stage in evaluate_decision(problem, best(problem)).stages
        ] == peaks
        with pytest.raises(Infeasible):
            best(replace(problem, memory_limit_bytes=49))
        together = replace(problem, schedule=find_schedule("gpipe"))  # both have four
        assert [
            stage.peak_bytes
            for stage in evaluate_decision(together, Decision.keeping_all((0, 1, 2))).stages
        ] == [
            4 + 50 * differentiable,
            4,
        ]


def test_what_later_layers_left_is_gone_while_earlier_ones_run() -> None:
    """The first layer needs most while it runs, but then the second's residuals are gone, of one
    micro-batch.
    """
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(30),), temporary_bytes=size)
        for i, size in enumerate((40, 15))
    )
    for microbatches, peak in ((1, 30 + 30 + 15), (3, 2 * 60 + 30 + 30 + 15)):
        problem = Problem(Costs(layers), 1, find_schedule("gpipe"), microbatches)
        assert peak_bytes(problem, Decision.keeping_all((0, 2))) == peak


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [("gpipe", [1, 1, 1]), ("1f1b", [1, 1, 1]), ("pipedream", [3, 2, 1]), ("pipedream-vertical-sync", [3, 3, 3]),
     ("2bw", [2, 2, 2])],
)  # fmt: skip
def test_schedules_hold_different_numbers_of_versions(schedule: str, versions: list[int]) -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),), parameter_bytes=10) for i in range(3)
    )
    problem = Problem(Costs(layers), 3, find_schedule(schedule), 4, 10 * max(versions))
    assert [stage.peak_bytes for stage in evaluate_decision(problem, best(problem)).stages] == [
        10 * v for v in versions
    ]
    with pytest.raises(Infeasible) as raised:
        best(replace(problem, memory_limit_bytes=10 * max(versions) - 1))
    assert raised.value.smallest_limit_bytes == 10 * max(versions)


def test_versions_move_cuts() -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),), parameter_bytes=10) for i in range(8)
    )
    flush, stash = (
        Problem(Costs(layers), 2, find_schedule(name), 4, 60) for name in ("1f1b", "pipedream")
    )
    assert best(flush).bounds == (0, 4, 8)
    assert best(stash).bounds == (0, 3, 8)  # two versions of four layers would be 80 bytes


def test_a_value_read_on_two_stages_is_held_on_both_and_once_on_one() -> None:
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),)) for i in range(4))
    problem = Problem(Costs(layers, shared=(Shared((1, 2), 100),)), 2, find_schedule("gpipe"), 2)
    even = Decision.keeping_all((0, 2, 4))
    assert [stage.peak_bytes for stage in evaluate_decision(problem, even).stages] == [200, 200]
    apart = replace(problem, memory_limit_bytes=200)
    assert best(apart).bounds == (0, 2, 4)
    together = evaluate_decision(problem, Decision.keeping_all((0, 3, 4)))
    assert [stage.peak_bytes for stage in together.stages] == [200, 0]


def test_a_tied_parameter_is_held_once_per_version_on_each_stage() -> None:
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),)) for i in range(4))
    tied = Shared((0, 3), 100, per_version=True)
    problem = Problem(Costs(layers, shared=(tied,)), 2, find_schedule("pipedream"), 4, 200)
    assert [stage.peak_bytes for stage in evaluate_decision(problem, best(problem)).stages] == [
        200,
        100,
    ]
    with pytest.raises(Infeasible):
        best(replace(problem, memory_limit_bytes=199))


def test_a_layer_may_be_run_again_from_an_input_that_is_run_again_too() -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(100),), input_bytes=10) for i in range(3)
    )
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 64, 64 * 10 + 3 * 100 + 2 * 10)
    assert best(problem).choices == (
        RECOMPUTE,
        RECOMPUTE_CHAIN,
        RECOMPUTE_CHAIN,
    )  # the stage's input alone is kept: torchgpipe's `always`
    with pytest.raises(Infeasible):
        best(replace(problem, memory_limit_bytes=64 * 10 + 3 * 100 + 2 * 10 - 1))


def test_a_layer_that_is_run_again_works_with_what_its_backward_makes_of_it() -> None:
    """Its residuals as its forward leaves them take 100; made by its backward, with all between,
    150.
    """
    options = Option(100), Option(0, extra_s=1.0, extra_bytes=150)
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, options, input_bytes=10) for i in range(2))
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 3)
    alone = evaluate_decision(problem, Decision((0, 2), (RECOMPUTE, RECOMPUTE)))
    run = evaluate_decision(problem, Decision((0, 2), (RECOMPUTE, RECOMPUTE_CHAIN)))
    assert alone.peak_bytes == 2 * (10 + 10) + 10 + 10 + 150
    assert run.peak_bytes == 2 * 10 + 10 + 100 + 10 + 150


def test_runs_are_as_long_as_pays() -> None:
    """A run keeps one input for each micro-batch, but has all residuals at once: here pairs are
    best.
    """
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(100),), input_bytes=30) for i in range(4)
    )
    pairs = 8 * 2 * 30 + 2 * 100 + 30
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 8, pairs)
    assert best(problem).choices == (RECOMPUTE, RECOMPUTE_CHAIN) * 2
    with pytest.raises(Infeasible) as raised:
        best(replace(problem, memory_limit_bytes=pairs - 1))
    assert raised.value.smallest_limit_bytes == pairs


def test_all_layers_run_again_alone_when_inputs_are_dear_to_keep_in_a_run() -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(1000),), input_bytes=1) for i in range(3)
    )
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 8, 3 * 8 + 1000)
    assert best(problem).choices == (RECOMPUTE,) * 3


def test_random_bits_are_kept_where_they_are_dearer_than_memory() -> None:
    """Dropping a mask saves few bytes and takes long; dropping activations saves many and takes
    little.
    """
    mask, rest, every = Option(90, extra_s=4.0), Option(20, extra_s=0.5), Option(0, extra_s=4.5)
    problem = one_stage((Option(100), mask, rest, every), 2, 190)
    assert best(problem).choices == (2,)


def test_points_inside_the_hull_are_chosen() -> None:
    """Prices alone see the ends of this frontier; the middle, which is dearer than their mixture,
    is what fits.
    """
    frontier = (Option(100), Option(60, extra_s=0.9), Option(0, extra_s=1.0))
    tight = (Option(100), Option(60, extra_s=0.6), Option(0, extra_s=0.8))
    layers = (LayerCost("a", 1.0, 1.0, frontier), LayerCost("b", 1.0, 1.0, tight))
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 1, 160)
    assert best(problem).choices == (0, 1)
    assert evaluate_decision(problem, best(problem)).stages[0].recompute_s == 0.6


def test_swaps_and_traffic_share_the_link_to_the_host() -> None:
    """A swap is hidden while the device computes; but not if the activations between stages need
    the link.
    """
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (KEEP, SWAP, AGAIN)) for i in range(2))
    edge = Edge(0, (1,), 250)
    problem = Problem(
        Costs(layers, (edge,)),
        2,
        find_schedule("gpipe"),
        4,
        250 + 200,
        host=Link(100.0),
        peer=Link(250.0),
    )
    assert best(replace(problem, peer_uses_host=False)).choices == (1, 0)
    assert best(problem).choices == (
        2,
        0,
    )  # 2 + 2 seconds on the link against 3 + 1 of work: fewer swapped bytes


def test_a_link_can_be_slower_than_the_work() -> None:
    problem = one_stage((KEEP, SWAP), 8, 200)
    slow = replace(problem, host=Link(10.0))
    assert evaluate_decision(slow, Decision((0, 1), (1,))).stages[0].seconds == 20.0
    assert best(slow).choices == (RECOMPUTE,)
    fast = replace(problem, host=INFINITE)
    assert evaluate_decision(fast, best(fast)).stages[0].seconds == 3.0


def test_the_slowest_stage_alone_does_not_make_the_step() -> None:
    """Recomputation off the slowest stage is free for the maximum, and not for the step."""
    again = Option(0, extra_s=1.0)
    layers = (
        LayerCost("a", 2.0, 4.0, (Option(10),)),
        *(LayerCost(f"b{i}", 1.0, 1.0, (Option(10), again)) for i in range(2)),
    )
    problem = Problem(Costs(layers), 2, find_schedule("1f1b"), 4, 20)
    assert best(problem).choices == (0, 0, 0)
    assert evaluate_decision(problem, best(problem)).step_s == 6 + 4 + 3 * 6


def test_with_few_micro_batches_the_least_sum_wins_over_the_best_balance() -> None:
    """The cut in the middle balances better, but sends more: it does not pay when M is small."""
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),)) for i in range(4))
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 8), Edge(2, (3,), 8))
    problem = Problem(
        Costs(layers, edges), 2, find_schedule("1f1b"), 2, peer=Link(4.0), peer_uses_host=False
    )
    assert best(problem).bounds == (0, 1, 4)
    assert best(replace(problem, microbatches=32)).bounds == (0, 2, 4)


def test_boundary_costs_make_the_furthest_reach_wrong() -> None:
    """The longest first stage ends where much is sent; one layer less leaves a plan that keeps the
    limit.
    """
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(10),)) for i in range(4))
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 1), Edge(2, (3,), 1000))
    problem = Problem(Costs(layers, edges), 2, find_schedule("gpipe"), 1, 40)
    assert best(problem).bounds in ((0, 1, 4), (0, 2, 4))
    assert evaluate_decision(problem, best(problem)).peak_bytes <= 40


def test_layers_that_belong_together_are_not_parted() -> None:
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(0),)) for i in range(4))
    problem = Problem(Costs(layers, together=((1, 2),)), 2, find_schedule("1f1b"), 4)
    assert best(problem).bounds in ((0, 1, 4), (0, 3, 4))
    with pytest.raises(ValueError, match="use at most 3 stages"):
        best(replace(problem, stages=4))


def test_without_a_limit_everything_is_kept() -> None:
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (KEEP, SWAP, AGAIN)) for i in range(6))
    problem = Problem(Costs(layers), 2, find_schedule("1f1b"), 4)
    assert jvpipe(problem).choices == (0,) * 6


def test_a_stage_alone_is_what_stage_cost_says() -> None:
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (KEEP, SWAP, AGAIN), 5, 6, 7, 8, 9) for i in range(3)
    )
    problem = Problem(Costs(layers), 1, find_schedule("gpipe"), 4, 700, host=Link(50.0))
    decision = best(problem)
    assert stage_cost(problem, 0, 0, 3, decision.choices).peak_bytes <= 700


def test_random_masks_are_candidates_that_cost_to_draw_again() -> None:
    m = CASES["chained-keys"]()
    traced = trace_model(m.loss_fn, m.params, m.batch, m.rng).traced
    layer = traced.graph.layers[1]
    (mask,) = (c for c in layer.candidates if c.name.startswith("random_bits"))
    assert mask.dtype == "bool"  # kept as what is made of the bits, a quarter of their size
    options = estimate(traced, find_cluster("cpu")).layers[1].options
    name = f"{traced.graph.label(layer)}/{mask.name}"
    alone = [option for option in options if option.fates == {name: "recompute"}]
    assert all(option.extra_s > 0 for option in alone)
    assert options[-1].fates[name] == "recompute"
    assert options[0].kept_bytes - options[-1].kept_bytes >= mask.bytes
