"""All planners, one line each, in the order in which they are listed: those of the papers, and jvpipe's own."""

from dataclasses import replace

from jvpipe.ir.names import did_you_mean
from jvpipe.papers.adapipe import adapipe
from jvpipe.papers.dapple import dapple
from jvpipe.papers.dawnpiper import dawnpiper
from jvpipe.papers.gpipe import gpipe
from jvpipe.papers.pipedream import pipedream
from jvpipe.papers.torchgpipe import torchgpipe, torchgpipe_size
from jvpipe.papers.vpipe import vpipe
from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.even import even
from jvpipe.planners.model.planner import FateRule, Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.unfolded import on_devices

PAPERS: tuple[Planner, ...] = (
    Planner(
        "even",
        even,
        "every stage has the same number of layers, give or take one",
        asks_seconds=False,
    ),
    Planner(
        "torchgpipe",
        torchgpipe,
        "stages differ by no more than the costliest layer's measured seconds",
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
    ),
    Planner(
        "dapple",
        dapple,
        "warm-up, steady phase and ending around the pivot stage take the least with everything kept",
    ),
    Planner(
        "vpipe",
        vpipe,
        "swaps, then recomputations, then moves of layers, until nothing improves",
        FateRule.CHOOSES,
    ),
    Planner(
        "dawnpiper",
        dawnpiper,
        "bisected between the compute-balanced and the memory-balanced cut",
        FateRule.CHOOSES,
    ),
    Planner(
        "adapipe",
        adapipe,
        "cuts and recomputations by dynamic programming",
        FateRule.CHOOSES,
    ),
)


def _joint(problem: Problem) -> Decision:
    plain = problem.schedule.chunks == 1 and not problem.splits
    return jvpipe(problem) if plain else under_rule(problem)


PLANNERS: tuple[Planner, ...] = (
    *(replace(planner, decide=on_devices(planner.decide)) for planner in PAPERS),
    Planner(
        "jvpipe",
        _joint,
        "cuts and fates that take the least seconds per step within the limit",
        FateRule.CHOOSES,
        as_paper=False,
    ),
)


def find_planner(name: str) -> Planner:
    """Returns the planner of that name.

    >>> find_planner("evn")
    Traceback (most recent call last):
    ...
    ValueError: unknown planner 'evn': did you mean 'even'? There are even, torchgpipe, torchgpipe-size, gpipe, \
pipedream, dapple, vpipe, dawnpiper, adapipe, jvpipe
    """
    for planner in PLANNERS:
        if planner.name == name:
            return planner
    raise ValueError(did_you_mean("planner", name, [planner.name for planner in PLANNERS]))
