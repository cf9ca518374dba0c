"""All planners in the order in which they are listed: the papers' planners, then jvpipe's own.

A paper's planner assumes one stage per device; `on_devices` extends it to several stages per
device.
"""

from dataclasses import replace

from jvpipe.papers.adapipe import adapipe
from jvpipe.papers.dapple import dapple
from jvpipe.papers.dapple_replicas import dapple_replicas
from jvpipe.papers.dawnpiper import dawnpiper
from jvpipe.papers.gpipe_cuts import gpipe_cuts
from jvpipe.papers.pipedream_cuts import pipedream
from jvpipe.papers.pipedream_replicas import pipedream_replicas
from jvpipe.papers.torchgpipe import torchgpipe, torchgpipe_size
from jvpipe.papers.vpipe import vpipe
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.even import even
from jvpipe.planners.model.planner import FateRule, Planner
from jvpipe.planners.model.unfolded import on_devices
from jvpipe.util.names import did_you_mean

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
        gpipe_cuts,
        "the stages' seconds vary as little as possible; everything is recomputed from the "
        "stage's input",
        FateRule.RECOMPUTES,
    ),
    Planner(
        "pipedream",
        pipedream,
        "the slowest stage is as fast as possible with everything kept",
        shape_rule=pipedream_replicas,
    ),
    Planner(
        "dapple",
        dapple,
        "warm-up, steady phase and ending around the pivot stage take the least time with "
        "everything kept",
        shape_rule=dapple_replicas,
    ),
    Planner(
        "vpipe",
        vpipe,
        "swaps, then recomputations, then moves of layers between stages, until nothing improves",
        FateRule.CHOOSES,
    ),
    Planner(
        "dawnpiper",
        dawnpiper,
        "the model is halved again and again, between the compute-balanced and the "
        "memory-balanced cut",
        FateRule.CHOOSES,
    ),
    Planner(
        "adapipe",
        adapipe,
        "dynamic programming finds cuts and recomputations",
        FateRule.CHOOSES,
    ),
)


PLANNERS: tuple[Planner, ...] = (
    *(replace(planner, decide=on_devices(planner.decide)) for planner in PAPERS),
    Planner(
        "jvpipe",
        under_rule,
        "cuts and fates make a step as fast as possible within the limit",
        FateRule.CHOOSES,
        as_paper=False,
    ),
)


def find_planner(name: str) -> Planner:
    """Returns the planner that has a name.

    Raises:
        ValueError: no planner has that name.

    >>> find_planner("evn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: unknown planner 'evn': did you mean 'even'? There are even, ...
    """
    for planner in PLANNERS:
        if planner.name == name:
            return planner
    raise ValueError(did_you_mean("planner", name, [planner.name for planner in PLANNERS]))


def reason_of(name: str) -> str:
    """Returns a clause that says how a planner decides; empty for a name that is not registered.

    >>> reason_of("given")
    'the cuts were given'
    """
    sentences = {planner.name: planner.why for planner in PLANNERS}
    return (sentences | {"given": "the cuts were given"}).get(name, "")


def shape_planners() -> tuple[str, ...]:
    """Names the planners that decide how many devices each stage has, jvpipe's own first."""
    every = sorted(PLANNERS, key=lambda planner: planner.as_paper)
    return tuple(planner.name for planner in every if planner.shapes)
