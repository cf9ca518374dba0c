"""The two streams of architectures, and where a static partition has their layers.

Slots have a home: the stage where the upper layer's own planner has them, in the first architecture
or in the one that fills all slots of a search. A static partition leaves every block at its home.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from jvpipe.models.architecture import Architecture, Block, SearchSpace
from jvpipe.models.evolution import RegularizedEvolution

STAGES = 4
PER_STAGE, FILLED = 10, 6
"""Slots of a stage in the stream of additions and removals, and how many of them are filled at
first.
"""
SLOTS, COUNT = 12, 30
"""Slots of the searched space, and how many architectures the search trains."""


class Given(RegularizedEvolution):
    """A search whose architectures are given; what is reported changes nothing."""

    def __init__(self, space: SearchSpace, architectures: Sequence[Architecture]) -> None:
        super().__init__(space, seed=0)
        self._given = iter(architectures)

    def __next__(self) -> Architecture:
        return next(self._given)


def changed(blocks: Sequence[Block]) -> list[Architecture]:
    """Two layers are added to stage 1, and again; then two are removed from stage 2, and again.

    `blocks` take turns in the slots.

    >>> [[len(a.names()) for a in changed([Block("glu", "none")])]]
    [[24, 26, 28, 26, 24]]
    """

    def architecture(counts: Sequence[int]) -> Architecture:
        filled = [
            slot % PER_STAGE < counts[slot // PER_STAGE] for slot in range(STAGES * PER_STAGE)
        ]
        return Architecture(
            tuple(blocks[i % len(blocks)] if there else None for i, there in enumerate(filled))
        )

    return [
        architecture((FILLED, FILLED + more, FILLED - fewer, FILLED))
        for more, fewer in ((0, 0), (2, 0), (4, 0), (4, 2), (4, 4))
    ]


def evolved(
    space: SearchSpace, count: int, loss: Callable[[Architecture], float], seed: int = 0
) -> list[Architecture]:
    """The first architectures of regularised evolution under a loss that is known beforehand."""
    evolution, found = RegularizedEvolution(space, seed), list[Architecture]()
    for _ in range(count):
        found.append(next(evolution))
        evolution.report(found[-1], loss(found[-1]))
    return found


def homes(graph: Any, slots: int, cuts: Sequence[int]) -> list[int]:
    """The home of each slot, given the layers per stage of one architecture; an empty slot goes
    with the one before.
    """
    stages = [s for s, count in enumerate(cuts) for _ in range(count)]
    found = {slot: stage for slot, stage in zip(_slots(graph), stages, strict=True) if slot >= 0}
    return list(accumulate((found.get(slot, 0) for slot in range(slots)), max))


def home_bounds(graph: Any, homes: Sequence[int], stages: int = STAGES) -> list[int]:
    """Where the stages of a static partition begin: what is before the first block is on the first
    stage.

    What is behind the last is on the last one, and what is between blocks on the stage of the block
    before. A stage without a layer takes its neighbor's last one.
    """
    blocks = _slots(graph)
    last = max(i for i, slot in enumerate(blocks) if slot >= 0)
    found = [
        stages - 1 if i > last else homes[slot] if slot >= 0 else 0 for i, slot in enumerate(blocks)
    ]
    found = list(accumulate(found, max))
    starts = [max(sum(home < s for home in found), s) for s in range(stages + 1)]
    for s in range(stages - 1, 0, -1):
        starts[s] = min(starts[s], starts[s + 1] - 1)
    return starts


def _slots(graph: Any) -> list[int]:
    """The slot of each layer; -1 for what is no block."""
    labels = [graph.label(layer) for layer in graph.layers]
    return [int(label.split("_")[1]) if label.startswith("block_") else -1 for label in labels]


def stand_in_loss(architecture: Architecture) -> float:
    """A loss for a search that trains nothing: it follows from the names of the blocks alone."""
    seed = [ord(letter) for letter in " ".join(architecture.names())]
    return float(np.random.default_rng(seed).random())
