"""From many candidates to a few: none is slower than the fastest of them, and all fit what their
own lists hold.
"""

from dataclasses import replace

from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.order_refine import refined
from jvpipe.planners.joint.rule_search import RuledPlan, fitting
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule
from tests.planners.joint.orders import placed, problem_of

RULES = ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half")


def test_what_comes_of_candidates_is_no_slower_and_fits() -> None:
    begin = []
    for name in RULES:
        problem, decision = placed(problem_of(12, 3, 6), find_schedule(name))
        tight = replace(
            problem, memory_limit_bytes=int(0.8 * evaluate_decision(problem, decision).peak_bytes)
        )
        fates = DeviceFates.of(tight)
        if one := fates.fastest(tight, decision.bounds):
            ruled = RuledPlan.of(tight, one, fates)
            begin += fitting(ruled, ruled.order)
    assert len(begin) >= 3
    found = refined(begin)
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    assert found[0].step_s < min(one.step_s for one in begin)
    assert found == refined(begin)
    for one in found:
        assert evaluate_decision(one.listed, one.decision).peak_bytes <= (
            one.problem.memory_limit_bytes or 0
        )


def test_of_no_candidates_comes_nothing() -> None:
    assert refined([]) == []
