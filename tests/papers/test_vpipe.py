"""vPipe's rules, one by one, and its decisions against the best there are."""

import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.kernighan_lin import initial_bounds
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.papers.vpipe import swap_recompute, vpipe
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.small import chain, limited

KEEP, SWAP, RECOMPUTE = 0, 1, 2


def block(kept: int = 6, recompute_s: float = 1.0, seconds: float = 3.0) -> LayerCost:
    options = (Option(kept), Option(0, swapped_bytes=kept), Option(0, extra_s=recompute_s))
    return LayerCost("block", seconds / 3, 2 * seconds / 3, options)


def first_stage(
    layers: list[LayerCost], save: int, host: Link, traffic_s: float = 0.0
) -> Selection:
    """Five micro-batches in flight on these layers, which must save so many bytes."""
    peer = Link(float("inf"), traffic_s)
    problem = chain([*layers, *[block(0)] * 4], 5, host=host, peer=peer)
    keeps = (
        evaluate_decision(problem, Decision.keeping_all([0, *range(len(layers), len(layers) + 5)]))
        .stages[0]
        .peak_bytes
    )
    segments = Segments(limited(problem, keeps - save))
    stage = Selection(segments, FateChanges(problem, 5), 0, 0, len(layers))
    swap_recompute(stage)
    return stage


def test_nothing_is_done_where_everything_fits() -> None:
    assert first_stage([block()] * 4, 0, Link(1.0)).choices == [KEEP] * 4


def test_swaps_fill_the_link_and_recomputation_does_the_rest() -> None:
    """A swap takes 6 bytes out and in, 4 seconds, and saves 3 of 5 copies; the stage computes for
    12.
    """
    host = Link(3.0)
    assert first_stage([block()] * 4, 18, host).choices.count(SWAP) == 1
    assert first_stage([block()] * 4, 3 * 18, host).choices.count(SWAP) == 3
    stage = first_stage([block()] * 4, 3 * 18 + 1, host)
    assert sorted(stage.choices) == [SWAP, SWAP, SWAP, RECOMPUTE]
    assert stage.seconds == 12 + 1


def test_activation_traffic_comes_first_on_the_link() -> None:
    """With 4 of the 12 seconds taken by what crosses the bounds, two swaps are hidden and not
    three.
    """
    stage = first_stage([block()] * 4, 3 * 18, Link(3.0), traffic_s=4.0)
    assert sorted(stage.choices) == [KEEP, SWAP, SWAP, RECOMPUTE]


def test_more_is_swapped_than_hides_only_if_recomputation_is_not_enough() -> None:
    swap_only = LayerCost(
        "block", 1.0, 2.0, (Option(0), Option(0, swapped_bytes=6, swaps_input=True)), input_bytes=6
    )
    assert first_stage([block()] * 4, 4 * 30, Link(3.0)).choices == [RECOMPUTE] * 4
    stage = first_stage([block(), swap_only], 30 + 6, Link(0.5))
    assert stage.choices == [RECOMPUTE, SWAP]
    assert stage.seconds > stage.compute_s


def test_what_saves_most_is_swapped_first() -> None:
    assert first_stage([block(2), block(8), block(4)], 1, Link(3.0)).choices == [KEEP, SWAP, KEEP]


def test_what_saves_most_per_second_is_recomputed_first() -> None:
    layers = [
        block(8, recompute_s=4.0, seconds=12.0),
        block(6, recompute_s=1.0),
        block(4, recompute_s=1.0),
    ]
    assert first_stage(layers, 1, Link(1e-3)).choices == [KEEP, RECOMPUTE, KEEP]
    assert first_stage(layers, 31, Link(1e-3)).choices == [KEEP, RECOMPUTE, RECOMPUTE]


def test_a_layer_leaves_the_stage_that_recomputation_makes_slowest() -> None:
    layer = LayerCost("block", 1.0, 2.0, (Option(4), Option(0, extra_s=1.0)))
    problem = chain([layer] * 24, 2, memory_limit_bytes=60)
    before = initial_bounds(Segments(problem))
    assert before == (0, 12, 24)
    decision = vpipe(problem)
    # 12 layers, of which 5 run again, took 41 seconds, and 12 others 36: eleven take 33 + 4,
    # thirteen 39.
    assert decision.bounds == (0, 11, 24)
    assert evaluate_decision(problem, decision).bottleneck_s == 39.0


def test_a_layer_passes_through_a_neighbor_that_is_as_slow() -> None:
    """The second stage may not keep both of its layers and the third's one is light: the layer
    ripples through.
    """
    layers = [block(4, seconds=3.0) for _ in range(9)]
    problem = chain(layers, 3, memory_limit_bytes=10**6)
    assert vpipe(problem).bounds == (0, 3, 6, 9)
    light = [*layers[:6], *[block(4, seconds=2.0)] * 3, block(4, seconds=0.5)]
    decision = vpipe(chain(light, 3))
    assert evaluate_decision(chain(light, 3), decision).bottleneck_s == pytest.approx(
        best_cut_s(light, 3)
    )


def best_cut_s(layers: list[LayerCost], stages: int) -> float:
    seconds = [layer.forward_s + layer.backward_s for layer in layers]
    if stages == 1:
        return sum(seconds)
    return min(
        max(sum(seconds[:i]), best_cut_s(layers[i:], stages - 1))
        for i in range(1, len(layers) - stages + 2)
    )


def test_memory_alone_moves_layers() -> None:
    """Balanced seconds would put six layers of which nothing can be saved on the first stage; four
    fit.
    """
    layer = LayerCost("block", 1.0, 2.0, (Option(0),), input_bytes=8)
    problem = chain([layer] * 12, 2, memory_limit_bytes=2 * 4 * 8 + 2)
    assert vpipe(problem).bounds == (0, 4, 12)
