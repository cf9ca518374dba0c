"""Stages whose devices take turns: the lists drawn, that all devices are busy under them, and what
is refused.
"""

from itertools import product

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, text
from jvpipe.lowering.order import dispatch_order
from jvpipe.schedules import PipeDream, PipeMare, TwoBW
from jvpipe.schedules.round_robin import RoundRobin, check_turns, taking_turns

PLAN = Plan.from_cuts([1, 1], devices=[(0, 1), 2])


def test_an_update_follows_one_backward_of_each_device() -> None:
    first, last = taking_turns(PipeDream(update_every=2), PLAN).with_updates(2, 6)
    assert text(first) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0U1 0F5 0B2 0B3 0U3 0B4 0B5 0U5"
    assert text(last) == "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3 1F4 1B4 1F5 1B5 1U5"
    assert taking_turns(TwoBW(), Plan.from_cuts([1, 1])).with_updates(2, 2) == TwoBW().with_updates(
        2, 2
    )


@pytest.mark.parametrize("replicas", [*product((1, 2, 4), repeat=3)])
def test_where_each_device_has_as_much_to_do_all_of_them_are_busy(
    replicas: tuple[int, ...],
) -> None:
    count = 64

    def waits_for(task: Task) -> list[Task]:
        s, kind, m = task
        if kind is Kind.F:
            return [Task(s - 1, kind, m)] if s else []
        return [Task(s, Kind.F, m), *([Task(s + 1, kind, m)] if s + 1 < len(replicas) else [])]

    def device(task: Task) -> int:
        return 10 * task.stage + task.microbatch % replicas[task.stage]

    def seconds(task: Task) -> float:
        return (2.0 if task.kind is Kind.B else 1.0) * replicas[task.stage]

    ends: dict[Task, float] = {}
    free: dict[int, float] = {}
    for task in dispatch_order(RoundRobin(replicas)(3, count), waits_for, seconds, device):
        start = max([free.get(device(task), 0.0), *(ends[other] for other in waits_for(task))])
        ends[task] = free[device(task)] = start + seconds(task)
    assert max(ends.values()) <= 3.0 * (count + sum(replicas))


@pytest.mark.parametrize("replicas", [(4, 1, 1), (2, 1, 4), (1, 2, 2)])
def test_what_is_held_is_that_of_a_full_stream(replicas: tuple[int, ...]) -> None:
    plan = Plan.from_cuts([1, 1, 1], [range(10 * s, 10 * s + r) for s, r in enumerate(replicas)])
    schedule = taking_turns(PipeDream(update_every=4), plan)
    assert schedule.in_flight(3, 4) == schedule.in_flight(3, 64) == RoundRobin(replicas).in_flight


def test_updates_need_a_backward_of_each_device() -> None:
    for schedule, micro, why in (
        (
            PipeDream(),
            4,
            r"update every 1 micro-batches .* has 2 replicas: .*PipeDream\(update_every=2\)",
        ),
        (TwoBW(), 2, "2bw on stages of .2, 1. devices needs at least 4"),
        (PipeMare(), 4, "pipemare, which keeps records"),
    ):
        with pytest.raises(ValueError, match=why):
            check_turns(schedule, PLAN, micro)
    check_turns(TwoBW(), PLAN, 4)
