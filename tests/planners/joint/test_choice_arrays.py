"""Choices in arrays, against the definition of each layer's bytes."""

from itertools import combinations

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.joint.choice_arrays import Choices
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Problem
from jvpipe.planners.model.stage_cost import stage_cost
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import tiny


@pytest.mark.parametrize("seed", range(3))
def test_columns_hold_what_a_layer_alone_takes(seed: int) -> None:
    problem = tiny(seed, "gpipe")
    table, n = Choices.of(problem.costs), len(problem.costs.layers)
    working, held, extra_s = (
        table.working_bytes,
        table.held_bytes((4, 0), slice(0, n)),
        table.extra_s(),
    )
    for at, layer in enumerate(problem.costs.layers):
        for column in (0, 1, 2, 3, RECOMPUTE):
            every = [0] * n
            every[at] = column
            cost = stage_cost(problem, 0, at, at + 1, every)
            need = working[at, column]
            if column == RECOMPUTE:
                need = table.recompute_peak_bytes[at] + layer.temporary_bytes
            fixed = layer.parameter_bytes + layer.gradient_bytes
            edges = stage_cost(problem, 0, at, at + 1, [0] * n).peak_bytes - (
                held[at, 0] + working[at, 0]
            )
            assert cost.peak_bytes == held[at, column] + need + edges
            assert edges >= fixed
            assert cost.host_bytes == 4 * table.swapped_bytes[at, column]
            assert cost.recompute_s == extra_s[at, column]


@pytest.mark.parametrize("slower", [(), (2.0, 1.0, 3.0, 0.5)])
def test_a_run_takes_the_forwards_of_all_its_layers_but_the_last(slower: tuple[float, ...]) -> None:
    layers = [
        LayerCost("block", forward_s, 9.0, (Option(8), Option(0, extra_s=1.0)))
        for forward_s in (2.0, 3.0, 5.0, 7.0)
    ]
    costs = Costs(tuple(layers))
    problem = Problem(costs, 1, find_schedule("gpipe"), 1).told_apart([slower], [])
    extra_s, times = Choices.of(problem.costs).extra_s(slower), slower or (1.0,) * 4
    for first, last in combinations(range(4), 2):
        run = [
            RECOMPUTE if at == first else RECOMPUTE_CHAIN if first < at <= last else 0
            for at in range(4)
        ]
        taken_s = (
            sum(times[at] * layers[at].forward_s for at in range(first, last)) + times[last] * 1.0
        )
        assert sum(extra_s[at, choice] for at, choice in enumerate(run)) == pytest.approx(taken_s)
        assert stage_cost(problem, 0, 0, 4, run).recompute_s == pytest.approx(taken_s)


def test_columns_beaten_in_all_bytes_are_left_out_whatever_their_seconds() -> None:
    table = Choices.of(tiny(0).costs)
    for layer, columns in enumerate(table.min_bytes_columns(((2, 0),))):
        rows = np.stack(
            [table.held_bytes((2, 0), slice(0, 4)), table.working_bytes, -table.left_bytes]
        )[:, layer]
        for column in range(4):
            own = rows[:, [column]]
            beaten = ((rows[:, :4] <= own).all(0) & (rows[:, :4] < own).any(0)).any()
            assert not (beaten and column in columns)
        assert columns[-2:].tolist() == [RECOMPUTE_CHAIN, RECOMPUTE]


def test_without_swaps_no_column_that_swaps_is_allowed() -> None:
    table = Choices.of(tiny(1).costs, swaps=False)
    assert not (table.allowed & (table.swapped_bytes > 0)).any()
    assert table.allowed[:, [0, RECOMPUTE]].all()
