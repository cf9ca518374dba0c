"""The largest batches that DawnPiper's authors report (Peng et al., 2025, tables 1 and 2).

A synchronous batch (table 1) is that of a step: as many micro-batches as there are stages. An
asynchronous one (table 2) is a micro-batch: section 5.4 calls T5's 110 a micro-batch size, "2.5
times" vPipe's 44 of the table.
"""

from typing import Literal, NamedTuple

MODELS = ("BERT", "GPT-2", "T5", "AmoebaNet")


class Row(NamedTuple):
    """A row of both tables: with or without memory optimization (swap and recompute; GPipe
    recomputes alone).
    """

    schedule: Literal["gpipe", "pipedream"]
    stages: int
    optimized: bool
    planner: str


REPORTED: dict[Row, tuple[int, int, int, int]] = {
    Row("gpipe", 4, False, "gpipe"): (52, 8, 144, 280),
    Row("gpipe", 4, False, "vpipe"): (60, 8, 144, 188),
    Row("gpipe", 4, False, "dawnpiper"): (72, 8, 160, 360),
    Row("gpipe", 4, True, "gpipe"): (120, 28, 348, 644),
    Row("gpipe", 4, True, "vpipe"): (128, 28, 348, 720),
    Row("gpipe", 4, True, "dawnpiper"): (160, 32, 424, 1220),
    Row("gpipe", 8, False, "gpipe"): (88, 16, 256, 480),
    Row("gpipe", 8, False, "vpipe"): (88, 16, 256, 264),
    Row("gpipe", 8, False, "dawnpiper"): (136, 16, 320, 560),
    Row("gpipe", 8, True, "gpipe"): (208, 48, 664, 1384),
    Row("gpipe", 8, True, "vpipe"): (208, 56, 664, 1424),
    Row("gpipe", 8, True, "dawnpiper"): (280, 60, 800, 2180),
    Row("pipedream", 4, False, "pipedream"): (16, 2, 40, 70),
    Row("pipedream", 4, False, "vpipe"): (16, 2, 40, 48),
    Row("pipedream", 4, False, "dawnpiper"): (32, 3, 78, 150),
    Row("pipedream", 4, True, "vpipe"): (46, 8, 110, 300),
    Row("pipedream", 4, True, "dawnpiper"): (84, 10, 192, 480),
    Row("pipedream", 8, False, "pipedream"): (16, 2, 44, 64),
    Row("pipedream", 8, False, "vpipe"): (16, 2, 44, 32),
    Row("pipedream", 8, False, "dawnpiper"): (40, 5, 84, 128),
    Row("pipedream", 8, True, "vpipe"): (58, 16, 144, 214),
    Row("pipedream", 8, True, "dawnpiper"): (100, 22, 248, 528),
}


def rows() -> list[Row]:
    """The rows of both tables, with our planner's after each group."""
    found = list(REPORTED)
    groups = dict.fromkeys(row[:3] for row in found)
    return [
        row
        for group in groups
        for row in [*(r for r in found if r[:3] == group), Row(*group, "jvpipe")]
    ]
