"""Where layers go, and each tensor's fate: one file per strategy, and their registry."""

from dataclasses import replace

from jvpipe.ir.names import did_you_mean
from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.planner import FateRule, Planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.unfolded import on_devices
from jvpipe.planners.published.registry import PUBLISHED


def _joint(problem: Problem) -> Decision:
    plain = problem.schedule.chunks == 1 and not problem.splits
    return jvpipe(problem) if plain else under_rule(problem)


PLANNERS: tuple[Planner, ...] = (
    *(replace(planner, decide=on_devices(planner.decide)) for planner in PUBLISHED),
    Planner(
        "jvpipe",
        _joint,
        "cuts and fates that take the least seconds per step within the limit",
        FateRule.CHOOSES,
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
