"""jvpipe's own planner under any schedule whose order of tasks is a rule."""

from collections.abc import Sequence

from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.joint.rule_search import under_rule
from jvpipe.planners.model.problem import Decision, Problem


def decide(problem: Problem, begin: Sequence[Decision] = ()) -> Decision:
    """Decides cuts and fates together, by the search that fits the problem's schedule.

    Args:
        problem: what is to be planned.
        begin: plans of this problem that keep the limits, of which a search may begin.

    Raises:
        Infeasible: nothing fits; with the smallest limit that would do.
    """
    one_stage_each = problem.schedule.chunks == 1 and not problem.splits
    return jvpipe(problem, begin=begin) if one_stage_each else under_rule(problem)
