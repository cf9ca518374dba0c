"""The course of orders against the simulator: when steps start, what follows them, and the longest
path.
"""

from random import Random

import pytest

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import read_lines
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.schedule import Schedule
from tests.planners.joint.orders import computing_again, loads_of, placed, problem_of

RULES = [
    *(find_schedule(name) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half")),
    Interleaved(chunks=3, split=True),
]


@pytest.mark.parametrize("link", [INFINITE, Link(4.0, 0.25)])
@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_the_clock_is_the_simulators(schedule: Schedule, link: Link) -> None:
    for seed, (devices, m) in enumerate([(1, 2), (2, 3), (3, 7), (4, 9)]):
        problem, decision = placed(problem_of(13, devices, m, seed, link=link), schedule)
        lists = schedule.tasks(devices, m)
        for one in (decision, computing_again(decision)):
            stages = evaluate_decision(problem, one).stages
            course = Course(Loads.of(problem, one), lists)
            assert course.step_s == pytest.approx(simulated_step_s(problem, stages))
        assert course.order == lists


@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_no_rule_is_under_the_bound(schedule: Schedule) -> None:
    for seed in range(4):
        loads = loads_of(problem_of(12, 4, 6, seed, link=Link(4.0)), schedule)
        assert Course(loads, schedule.tasks(4, 6)).step_s >= loads.bound_s() - 1e-9


def test_steps_that_wait_for_each_other_are_stuck() -> None:
    loads = loads_of(problem_of(2, 2, 1), find_schedule("1f1b"))
    for lines in (
        ("0F0 0B0", "1B0 1F0"),
        ("0B0 0F0", "1F0 1B0"),
        ("0F0 0B0", "1F0 1W0 1I0"),
    ):
        assert Course(loads, read_lines(lines)).step_s == float("inf")


@pytest.mark.parametrize("schedule", RULES[2:], ids=lambda schedule: schedule.name)
def test_a_step_may_take_longer_by_its_slack_and_no_more(schedule: Schedule) -> None:
    loads = loads_of(problem_of(12, 3, 4), schedule, again=True)
    course = Course(loads, schedule.tasks(3, 4))
    course.follow()
    before_s = course.step_s
    slack_s = {step: before_s - course.ends[step] - course.tails[step] for step in course.ran}
    assert min(slack_s.values()) == pytest.approx(0)
    for step, slack in slack_s.items():
        own_s = course.seconds[step]
        for more_s in (0, 1):
            course.seconds[step] = own_s + slack + more_s
            course.run()
            assert course.step_s == pytest.approx(before_s + more_s)
        course.seconds[step] = own_s


@pytest.mark.parametrize("link", [INFINITE, Link(1.0, 0.25)])
@pytest.mark.parametrize("schedule", RULES, ids=lambda schedule: schedule.name)
def test_a_longest_path_goes_from_the_start_to_the_end(schedule: Schedule, link: Link) -> None:
    course = Course(loads_of(problem_of(13, 3, 6, link=link), schedule), schedule.tasks(3, 6))
    for seed in range(3):
        *_, first = blocks = course.path(Random(seed))
        assert course.starts[course.lists[first.device][first.first]] == 0
        last = blocks[0]
        updates_s = course.updates_s[last.device]
        assert course.ends[course.lists[last.device][last.last]] + updates_s == course.step_s
        busy_s = [updates_s] + [
            course.seconds[x] for d, i, j in blocks for x in course.lists[d][i : j + 1]
        ]
        assert sum(busy_s) <= course.step_s + 1e-9
        assert link != INFINITE or sum(busy_s) == pytest.approx(course.step_s)
