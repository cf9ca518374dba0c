"""A stage's bytes, against a list of all that lies on the device at every moment of its work."""

from itertools import pairwise, product

import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option, Shared
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Problem
from jvpipe.planners.model.stage_bytes import (
    StageBytes,
    layers_bytes,
    on_device_bytes,
    stage_bytes,
)
from jvpipe.schedules import find_schedule

LAYERS = (
    LayerCost("a", 1.0, 2.0, (Option(16), Option(0, 16), Option(0, 0, 1.0, 8)), 3, 5, 7, 2, 1),
    LayerCost("b", 1.0, 2.0, (Option(32), Option(4, 28), Option(4, 0, 1.0, 20)), 3, 5, 7, 4, 64),
    LayerCost(
        "c",
        1.0,
        2.0,
        (Option(8), Option(0, 8, swaps_input=True), Option(2, 0, 1.0, 4)),
        3,
        5,
        7,
        1,
        0,
    ),
)


def most_bytes(choices: tuple[int, ...], in_flight: int, shared: int = 0) -> int:
    """The most that lies there, where every micro-batch in flight but one waits and one is built up
    layer by layer.

    Of those that wait one alone has its swapped bytes still there: on their way out, or in again.
    """
    left, needs, run = [], [], 0
    for at, (layer, choice) in enumerate(zip(LAYERS, choices, strict=True)):
        if choice >= 0:
            option = layer.options[choice]
            kept = {
                "kept": option.kept_bytes,
                "input": 0 if option.swaps_input else layer.input_bytes,
            }
            swapped = option.swapped_bytes + layer.input_bytes - kept["input"]
            left.append((sum(kept.values()), swapped))
            needs.append(option.extra_bytes + layer.temporary_bytes)
        else:
            left.append((layer.input_bytes if choice == RECOMPUTE else 0, 0))
            run = run + layer.input_bytes if choice == RECOMPUTE_CHAIN else 0
            last = at + 1 == len(choices) or choices[at + 1] != RECOMPUTE_CHAIN
            dropped = layer.options[-1]
            own = dropped.kept_bytes + dropped.swapped_bytes + dropped.extra_bytes
            needs.append(
                run + (own if last else layer.options[0].kept_bytes) + layer.temporary_bytes
            )
            run += layer.options[0].kept_bytes
    waiting = [sum(kept for kept, _ in left) + shared] * (in_flight - 1)
    if waiting:
        waiting[0] += sum(swapped for _, swapped in left)
    moments = [sum(map(sum, left[: at + 1])) + need + shared for at, need in enumerate(needs)]
    return sum(waiting) + max(moments)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_the_peak_is_the_fullest_moment(microbatches: int) -> None:
    for shared in (0, 9):
        costs = Costs(LAYERS, shared=(Shared((0, 2), shared),))
        problem = Problem(costs, 1, find_schedule("gpipe"), microbatches)
        for choices in product(range(RECOMPUTE_CHAIN, 3), repeat=3):
            runs = all(b != RECOMPUTE_CHAIN or a < 0 for a, b in pairwise(choices))
            if runs and choices[0] != RECOMPUTE_CHAIN:
                held = stage_bytes(problem, 0, 0, 3, choices)
                assert held.peak == 3 * (3 + 5 + 7) + most_bytes(choices, microbatches, shared), (
                    choices
                )
                assert held.host == microbatches * held.swapped


def test_parameters_count_per_version_and_tied_ones_with_them() -> None:
    costs = Costs(LAYERS, shared=(Shared((0, 2), 100, per_version=True),))
    for name, versions in (("1f1b", 1), ("2bw", 2), ("pipedream", 3)):
        problem = Problem(costs, 3, find_schedule(name), 6)
        assert stage_bytes(problem, 0, 0, 1, (0, 0, 0)).static == versions * (3 + 100) + 12
        assert stage_bytes(problem, 1, 1, 2, (0, 0, 0)).static in (3 + 12, 2 * 3 + 12)


def test_a_run_of_layers_recomputed_has_all_their_residuals_at_once() -> None:
    working = [
        x.working for x in layers_bytes(LAYERS, (RECOMPUTE, RECOMPUTE_CHAIN, RECOMPUTE_CHAIN))
    ]
    assert working == [16 + 1, 16 + 4 + 32 + 64, 16 + 4 + 32 + 1 + (2 + 4) + 0]


def test_two_micro_batches_at_most_have_swapped_bytes_on_the_device() -> None:
    assert [on_device_bytes(k, 0, 7) for k in (1, 2, 3, 9)] == [7, 14, 14, 14]
    assert (
        StageBytes(in_flight=4, static=1, kept=10, swapped=100, beyond=1000).peak
        == 1 + 40 + 200 + 1000
    )
