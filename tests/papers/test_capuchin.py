"""FreeTime and MSPS by hand, and what they choose."""

import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.capuchin import free_time_s, memory_saved_per_second, optimize
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.small import chain, limited

KEEP, SWAP, RECOMPUTE = 0, 1, 2


def block(kept: int, recompute_s: float = 1.0, backward_s: float = 2.0) -> LayerCost:
    """Its forward takes as long as to compute it again."""
    options = (Option(kept), Option(0, swapped_bytes=kept), Option(0, extra_s=recompute_s))
    return LayerCost("block", recompute_s, backward_s, options)


def first_stage(
    layers: list[LayerCost], save: int, bytes_per_s: float, stages: int = 3
) -> Selection:
    """The first of so many stages under 1F1B, which must save so many bytes."""
    problem = chain([*layers, *[block(0)] * (stages - 1)], stages, host=Link(bytes_per_s))
    bounds = [0, *range(len(layers), len(layers) + stages)]
    keeps = evaluate_decision(problem, Decision.keeping_all(bounds)).stages[0].peak_bytes
    segments = Segments(limited(problem, keeps - save))
    return Selection(segments, FateChanges(problem, stages), 0, 0, len(layers))


def test_free_time_is_what_the_copies_leave() -> None:
    """Two of three micro-batches in flight are others, 9 s each; behind the first layer lie two
    more, 3 s each.
    """
    stage = first_stage([block(4), block(4), block(4)], 0, bytes_per_s=2.0)
    free = [free_time_s(stage, stage.changes.swaps(layer, KEEP)[0]) for layer in range(3)]
    assert free == [2 * 9 + 6 - 4, 2 * 9 + 3 - 4, 2 * 9 + 0 - 4]


def test_memory_saved_per_second() -> None:
    stage = first_stage([block(4, recompute_s=2.0)], 0, bytes_per_s=2.0)
    swap, recompute = (
        m for m in sorted(stage.changes.after(0, KEEP), key=lambda m: m.choice) if m.choice > 0
    )
    assert memory_saved_per_second(stage, swap) == (3 - 2) * 4 / (2 * 4 / 2.0)
    assert memory_saved_per_second(stage, recompute) == 3 * 4 / 2.0


def test_the_longest_free_time_is_swapped_first() -> None:
    """The first layer's is longest, though the second would save more."""
    stage = first_stage([block(4), block(6), block(4)], 4, bytes_per_s=4.0)
    optimize(stage)
    assert stage.choices == [SWAP, KEEP, KEEP]


def test_what_does_not_hide_in_its_free_time_is_not_swapped() -> None:
    """24 bytes out and in take 27 s, of which the first two layers have 24 and 21; 4 bytes take 4.5
    s of 18.
    """
    stage = first_stage([block(24), block(24), block(4)], 1, bytes_per_s=16 / 9)
    assert free_time_s(stage, stage.changes.swaps(0, KEEP)[0]) == pytest.approx(24 - 27)
    optimize(stage)
    assert stage.choices == [KEEP, KEEP, SWAP]


def test_recomputation_follows_when_the_link_is_full() -> None:
    """One swap of 4 bytes takes 8 s of the stage's 9."""
    stage = first_stage([block(4)] * 3, 5, bytes_per_s=1.0)
    optimize(stage)
    assert stage.choices in ([SWAP, KEEP, RECOMPUTE], [SWAP, RECOMPUTE, KEEP])
    assert stage.seconds == 10.0


def test_what_saves_most_per_second_comes_first_when_the_link_is_full() -> None:
    """The first layer's swap takes 20 s of the stage's 24, the second's would take 6, for 6 copies
    of 6 bytes.

    To compute the second again saves 8 copies of 6 bytes in 12 s; the first, of which 2 copies are
    left, 40 in 7 s.
    """
    stage = first_stage(
        [block(20, 7.0, backward_s=1.0), block(6, 12.0, backward_s=4.0)], 6 * 20 + 1, 2.0, stages=8
    )
    optimize(stage)
    assert stage.choices == [SWAP, SWAP]
    assert stage.seconds == 26.0


def test_the_last_stage_swaps_nothing() -> None:
    problem = limited(chain([block(4)] * 3, 1, host=Link(100.0)), 14)
    stage = Selection(Segments(problem), FateChanges(problem, 1), 0, 0, 3)
    optimize(stage)
    assert SWAP not in stage.choices
    assert stage.excess_bytes == 0
