"""What fates of handed values would give: python -m experiments.schedules.handed

What the first half of a backward hands the second could be computed again there, or go to the host.
Drawn models are planned by `auto` as they are, then as if feed-forward networks computed their
large product again (half of a forward's seconds, 1.05 MB less), and as if handed values took no
bytes and no seconds, which no fate is better than.
"""

import statistics
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product

from experiments.schedules.cases import DEVICES, HALVES, KB, LAYERS, bytes_of_1f1b, drawn
from jvpipe.cost.costs import LayerCost, SplitCost
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.problem import Problem

ROUNDS, SEND, LIMITS = (1, 2), 0.1, (0.8, 0.6)
PRODUCT_BYTES, PRODUCT_SHARE = 1_050 * KB, 0.5
"""The large product of a feed-forward network: its bytes, and its seconds per second of a
forward.
"""
AGAIN = {"all": range(1, LAYERS, 2), "last quarter": range(3 * LAYERS // 4 + 1, LAYERS, 2)}
"""Layers that compute it again."""


def main() -> None:
    """Prints the table."""
    print("| devices | I : W | layers | limit | " + " | ".join(AGAIN) + " | handed for nothing |")
    print("|---|---|---|---|" + "---|" * (len(AGAIN) + 1))
    columns: list[list[float]] = [[] for _ in range(len(AGAIN) + 1)]
    for devices, rounds, halves, uneven in product(DEVICES, ROUNDS, HALVES, (False, True)):
        free = drawn(devices, devices * rounds, halves, SEND, uneven)
        full_bytes = bytes_of_1f1b(free)
        for limit in LIMITS:
            problem = replace(free, memory_limit_bytes=int(limit * full_bytes))
            others = [*(again(problem, layers) for layers in AGAIN.values()), for_nothing(problem)]
            usual_s = find_order(problem).step_s
            over = [find_order(other).step_s / usual_s for other in others]
            for column, each in zip(columns, over, strict=True):
                column.append(each)
            shown = (
                f"{devices}, M {devices * rounds} | {halves[0]} : {halves[1]} | "
                f"{'uneven' if uneven else 'alike'}"
            )
            print(
                f"| {shown} | {limit} | {' | '.join(f'{each:.3f}' for each in over)} |", flush=True
            )
    for name, of in (("least", min), ("median", statistics.median), ("most", max)):
        print(f"| {name} | | | | {' | '.join(f'{of(column):.3f}' for column in columns)} |")


def again(problem: Problem, layers: Collection[int]) -> Problem:
    """The problem in which W of some layers computes the large product again."""

    def leaner(layer: LayerCost, split: SplitCost) -> SplitCost:
        seconds = split.weight_s + PRODUCT_SHARE * layer.forward_s
        return replace(split, handed_bytes=split.handed_bytes - PRODUCT_BYTES, weight_s=seconds)

    return _with_splits(problem, layers, leaner)


def for_nothing(problem: Problem) -> Problem:
    """The problem in which handed values take no bytes."""
    return _with_splits(problem, range(LAYERS), lambda _, split: replace(split, handed_bytes=0))


def _with_splits(
    problem: Problem, layers: Collection[int], split_of: Callable[[LayerCost, SplitCost], SplitCost]
) -> Problem:
    costs = tuple(
        replace(layer, split=split_of(layer, layer.split))
        if layer.split and at in layers
        else layer
        for at, layer in enumerate(problem.costs.layers)
    )
    return replace(problem, costs=replace(problem.costs, layers=costs))


if __name__ == "__main__":
    main()
