"""Where layers go, and each tensor's fate: one file per strategy, and their registry."""

from collections.abc import Callable

from jvpipe.ir.names import did_you_mean
from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.published.adapipe import adapipe
from jvpipe.planners.published.dapple import dapple
from jvpipe.planners.published.dawnpiper import dawnpiper
from jvpipe.planners.published.even import even
from jvpipe.planners.published.gpipe import gpipe
from jvpipe.planners.published.pipedream import pipedream
from jvpipe.planners.published.torchgpipe import torchgpipe, torchgpipe_size
from jvpipe.planners.published.vpipe import vpipe

PLANNERS: dict[str, Callable[[Problem], Decision]] = {
    "even": even,
    "torchgpipe": torchgpipe,
    "torchgpipe-size": torchgpipe_size,
    "gpipe": gpipe,
    "pipedream": pipedream,
    "dapple": dapple,
    "vpipe": vpipe,
    "dawnpiper": dawnpiper,
    "adapipe": adapipe,
    "jvpipe": jvpipe,
}
UNTIMED = frozenset({"even", "torchgpipe-size"})
"""Planners that ask for no seconds."""
CHOOSING = frozenset({"vpipe", "dawnpiper", "adapipe", "jvpipe"})
"""Planners that choose fates under a memory limit."""
KEEPING = frozenset(PLANNERS) - CHOOSING - {"gpipe"}
"""Planners that keep everything."""


def find_planner(name: str) -> Callable[[Problem], Decision]:
    """The planner of that name.

    >>> find_planner("evn")
    Traceback (most recent call last):
    ...
    ValueError: unknown planner 'evn': did you mean 'even'? There are even, torchgpipe, torchgpipe-size, gpipe, \
pipedream, dapple, vpipe, dawnpiper, adapipe, jvpipe
    """
    if name not in PLANNERS:
        raise ValueError(did_you_mean("planner", name, list(PLANNERS)))
    return PLANNERS[name]
