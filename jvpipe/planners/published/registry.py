"""The planners of the papers, one line each, in the order in which they are listed."""

from jvpipe.planners.model.planner import FateRule, Planner
from jvpipe.planners.published.adapipe import adapipe
from jvpipe.planners.published.adapipe import attempt as adapipe_attempt
from jvpipe.planners.published.dapple import dapple
from jvpipe.planners.published.dawnpiper import attempt as dawnpiper_attempt
from jvpipe.planners.published.dawnpiper import dawnpiper
from jvpipe.planners.published.even import even
from jvpipe.planners.published.gpipe import gpipe
from jvpipe.planners.published.pipedream import pipedream
from jvpipe.planners.published.torchgpipe import torchgpipe, torchgpipe_size
from jvpipe.planners.published.vpipe import attempt as vpipe_attempt
from jvpipe.planners.published.vpipe import vpipe

PUBLISHED: tuple[Planner, ...] = (
    Planner(
        "even",
        even,
        "every stage has the same number of layers, give or take one",
        asks_seconds=False,
        rival_layers=100_000,
    ),
    Planner(
        "torchgpipe",
        torchgpipe,
        "stages differ by no more than the costliest layer's measured seconds",
        rival_layers=1_000,
    ),
    Planner(
        "torchgpipe-size",
        torchgpipe_size,
        "stages differ by no more than the largest layer's bytes of parameters",
        asks_seconds=False,
    ),
    Planner(
        "gpipe",
        gpipe,
        "the stages' seconds vary as little as they can; everything is computed again from the stage's input",
        FateRule.RECOMPUTES,
    ),
    Planner(
        "pipedream",
        pipedream,
        "the slowest stage is as fast as it can be with everything kept",
        rival_layers=512,
        needs_all_kept=True,
    ),
    Planner(
        "dapple",
        dapple,
        "warm-up, steady phase and ending around the pivot stage take the least with everything kept",
        rival_layers=1_024,
        needs_all_kept=True,
    ),
    Planner(
        "vpipe",
        vpipe,
        "swaps, then recomputations, then moves of layers, until nothing improves",
        FateRule.CHOOSES,
        rival_layers=2_000,
        attempt=vpipe_attempt,
    ),
    Planner(
        "dawnpiper",
        dawnpiper,
        "bisected between the compute-balanced and the memory-balanced cut",
        FateRule.CHOOSES,
        rival_layers=2_000,
        attempt=dawnpiper_attempt,
    ),
    Planner(
        "adapipe",
        adapipe,
        "cuts and recomputations by dynamic programming",
        FateRule.CHOOSES,
        rival_layers=128,
        attempt=adapipe_attempt,
    ),
)
