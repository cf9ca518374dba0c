"""A plan's lists are its own, or its schedule's; what does not fit it is refused with the cure."""

from dataclasses import replace

import pytest

from jvpipe.ir.plan import Plan
from jvpipe.ir.task import text
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import lists_of, pipeline_length

LOOP = Plan.from_cuts([1, 1, 1, 1], devices=[0, 1, 0, 1])
OWN = replace(
    Plan.from_cuts([1, 1], schedule="auto"),
    tasks=("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0"),
)


def test_a_device_has_a_list_whatever_stages_it_runs() -> None:
    assert pipeline_length(LOOP, find_schedule("1f1b")) == 4
    assert pipeline_length(LOOP, find_schedule("interleaved")) == 2
    assert (
        text(lists_of(LOOP, find_schedule("interleaved"), 2)[1])
        == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


def test_own_lists_come_first_and_halves_of_the_first_stage_are_one() -> None:
    assert list(map(text, lists_of(OWN, find_schedule("auto"), 2))) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1I0 1F1 1B1 1W0",
    ]
    assert pipeline_length(OWN, find_schedule("auto")) == 2
    assert Plan.from_json(OWN.to_json()) == OWN
    assert OWN.with_schedule("1f1b").tasks == ()


@pytest.mark.parametrize(
    ("plan", "schedule", "told"),
    [
        (
            Plan.from_cuts([1, 1, 1]),
            "interleaved",
            "2 stages per device, but the plan has 3 stages",
        ),
        (
            Plan.from_cuts([1, 1, 1, 1]),
            "interleaved",
            r"one device runs stages \[0, 2\], but in the plan .* \[0, 2\]",
        ),
        (
            replace(OWN, tasks=(OWN.tasks[0], "1F0 1I0 1F1 1B1")),
            "auto",
            r"F, B, I and W \[1, 0, 1, 0\] times for stage 1",
        ),
        (
            replace(OWN, tasks=(*OWN.tasks, "2F0")),
            "auto",
            "have 2F0, which is not a task of a step with 2 stages",
        ),
        (
            replace(OWN, tasks=("0F0 0B0", "1F0 1B0")),
            "auto",
            "micro-batch 1: a step of 2 micro-batches",
        ),
    ],
)
def test_lists_that_do_not_fit_are_refused(plan: Plan, schedule: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        lists_of(plan, find_schedule(schedule), 2)
