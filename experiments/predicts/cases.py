"""What others measured and printed, and which half of it may be looked at while constants are
sought.

Each table is cut in two by a draw: constants are fitted on one half, and the other half judges
them. What a plan for absent hardware rests on most is never fitted: torchgpipe's eight devices, and
BERT from 4 examples to 16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Half = Literal["fitted", "judged"]

SEED = 34
"""Of the draw, which was committed before anything was fitted."""


@dataclass(frozen=True)
class Case:
    """A number that a paper or its authors' repository printed.

    Attributes:
        paper: whose.
        table: of the paper, or the file of its repository.
        name: of the row.
        published: examples per second; of `gain` rows, how many times the other setting's.
        always_judged: whether no draw may give it to the fitted half.
    """

    paper: str
    table: str
    name: str
    published: float
    always_judged: bool = False


TORCHGPIPE = "torchgpipe (Kim et al., 2020)"
AMOEBANET = tuple(
    Case(TORCHGPIPE, "AmoebaNet-D (18, 256)", f"n={n}, m={m}", rate, always_judged=n == 8)
    for n, m, rate in (
        *((2, 1, 26.733), (2, 4, 41.133), (2, 32, 47.386)),
        *((4, 1, 26.827), (4, 4, 44.543), (4, 32, 72.412)),
        *((8, 1, 24.918), (8, 4, 70.065), (8, 32, 132.413)),
    )
)
UNET = tuple(
    Case(TORCHGPIPE, "U-Net (5, 64)", name, rate)
    for name, rate in (
        ("Naive-1", 28.500),
        ("Pipeline-1", 24.456),
        ("Pipeline-2", 35.502),
        ("Pipeline-4", 67.042),
        ("Pipeline-8", 88.497),
    )
)
DAPPLE = tuple(
    Case("DAPPLE (Fan et al., 2021)", "VI, BERT-48 on two stages", f"{system}, M={m}", rate)
    for system, m, rate in (
        ("GPipe", 2, 5.10),
        *(("GPipe + RC", 2, 4.00), ("GPipe + RC", 5, 5.53)),
        *(("DAPPLE", 2, 5.10), ("DAPPLE", 8, 7.60), ("DAPPLE", 16, 8.18)),
        *(("DAPPLE + RC", 2, 4.24), ("DAPPLE + RC", 8, 6.23), ("DAPPLE + RC", 16, 6.77)),
    )
)
PROFILES = (
    Case("PipeDream (Narayanan et al., 2019)", "profiles", "vgg16", 128 / 0.672535),
    Case("PipeDream (Narayanan et al., 2019)", "profiles", "resnet50", 128 / 0.443419),
    Case("Tarnawski et al., 2020", "profiles", "bert24", 8 / 0.217813),
)
"""Examples of a batch over the seconds of all its layers, forward and backward."""
VPIPE = (
    Case(
        "vPipe (Zhao et al., 2021)",
        "README, BERT on 8",
        "gain of micro-batches of 16 over 4",
        2.14 / 1.28,
        always_judged=True,
    ),
)
"""The hours of an epoch: PipeDream's at micro-batches of 4, vPipe's at 16."""

TABLES: tuple[tuple[Case, ...], ...] = (AMOEBANET, UNET, DAPPLE, PROFILES, VPIPE)


def halves(tables: Sequence[Sequence[Case]] = TABLES, seed: int = SEED) -> dict[Case, Half]:
    """Draws the half of each case: of each table as many are fitted as judged, or one less.

    >>> halves()[AMOEBANET[8]], sorted(halves()[case] for case in UNET)
    ('judged', ['fitted', 'fitted', 'judged', 'judged', 'judged'])
    """
    rng = np.random.default_rng(seed)
    drawn: dict[Case, Half] = {}
    for table in tables:
        free = [case for case in table if not case.always_judged]
        fitted = {free[i] for i in rng.permutation(len(free))[: len(table) // 2]}
        drawn |= {case: "fitted" if case in fitted else "judged" for case in table}
    return drawn
