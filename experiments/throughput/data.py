"""The numbers of the transformer that is timed: sizes, parameters and a batch, for any
framework.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

HEADS = 4
MICRO_BATCH, MICRO_BATCHES = 4, 8


@dataclass(frozen=True)
class Sizes:
    """What the products are made of."""

    width: int = 256
    tokens: int = 128
    vocabulary: int = 2000
    blocks: int = 8


def transformer_params(sizes: Sizes = Sizes()) -> Any:
    rng, width = np.random.default_rng(0), sizes.width

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=0.02).astype(np.float32)

    ones = np.ones(width, np.float32)
    shapes = {
        "wqkv": (width, 3 * width),
        "wo": (width, width),
        "w1": (width, 4 * width),
        "w2": (4 * width, width),
    }
    blocks = [
        {"ln1": ones, "ln2": ones} | {k: draw(*s) for k, s in shapes.items()}
        for _ in range(sizes.blocks)
    ]
    ends = {"embed": draw(sizes.vocabulary, width), "pos": draw(sizes.tokens, width)}
    return ends | {"lnf": ones, "out": draw(width, sizes.vocabulary), "blocks": blocks}


def transformer_batch(sizes: Sizes = Sizes()) -> Any:
    rng = np.random.default_rng(1)
    shape = (MICRO_BATCH * MICRO_BATCHES, sizes.tokens)
    return {
        k: rng.integers(0, sizes.vocabulary, shape).astype(np.int32) for k in ("tokens", "targets")
    }
