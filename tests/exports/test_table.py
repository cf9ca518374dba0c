"""Formats, schedules and workloads: what is exported says the plan, to readers of the formats' own
definitions.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from jvpipe import models
from jvpipe.exports.formats import FORMATS
from jvpipe.schedules import SCHEDULES
from tests.exports.plans import CASES, again, check, for_six, order_of, plan, planned, sized
from tests.exports.readers import READERS
from tests.grid import grid

GOLDEN = Path(__file__).with_name("golden")
FLUSHED = tuple(name for name, schedule in SCHEDULES.items() if schedule.synchronous)
REASON = (
    r"cannot say all of this plan; lost would be |nothing near|the model is not an embedding|"
    r"blocks of the model are not alike|blocks are too few"
)


@pytest.mark.parametrize("workload", grid(models.NAMES, "gpt2"))
@pytest.mark.parametrize("schedule", grid(SCHEDULES, "gpipe", "interleaved", "auto", "pipedream"))
@pytest.mark.parametrize("name", FORMATS)
def test_a_workloads_plan_is_said_or_refused_by_what_is_lost(
    name: str, schedule: str, workload: str
) -> None:
    given = planned(workload, schedule)
    try:
        text = given.export(name)
    except ValueError as refused:
        with pytest.raises(ValueError, match=REASON):
            raise refused
        return
    check(given, READERS[name](text, 4))


@pytest.mark.thorough
def test_the_table_has_both_kinds_of_cells() -> None:
    """Of GPT-2, whose plans are of a stack: what each format must be able to say."""
    said = {"megatron": "1f1b", "torchtitan": "gpipe", "maxtext": "gpipe"}
    for name, schedule in said.items():
        assert READERS[name](planned("gpt2", schedule).export(name), 4).blocks
    for schedule in FLUSHED[:-1]:
        assert planned("vgg", schedule).export("torch-csv")
        assert schedule == "v-half" or planned("vgg", schedule).export("jaxpp")
    with pytest.raises(
        ValueError, match=r"backwards of a split stage stay whole: those of layers \[8\]"
    ):
        planned("vgg", "auto").export("torch-csv")
    with pytest.raises(ValueError, match="updates before the step ends: schedule pipedream"):
        planned("vgg", "pipedream").export("torch-csv")


GIVEN = [(case, name) for case, (_, names) in CASES.items() for name in names]


@pytest.mark.parametrize(("case", "name"), GIVEN)
def test_a_file_is_as_it_was_and_says_the_plan(case: str, name: str) -> None:
    """The golden files were read by the readers here; whoever changes one looks at it."""
    given = for_six(CASES[case][0])
    text = given.export(name)
    assert text == (GOLDEN / f"{case}.{name}").read_text()
    check(given, READERS[name](text, 6))


@pytest.mark.parametrize("name", ["torchtitan", "maxtext"])
def test_all_blocks_computed_again_are_said(name: str) -> None:
    fates = [again(0) | again(1), again(2) | again(3), again(4) | again(5)]
    stages = zip(for_six(plan([5, 4, 5], "gpipe")).stages, fates, strict=True)
    given = replace(
        for_six(plan([5, 4, 5], "gpipe")),
        stages=tuple(replace(stage, fates=each) for stage, each in stages),
    )
    check(given, READERS[name](given.export(name), 6))


def test_the_first_blocks_of_each_stage_computed_again_are_said_to_megatron() -> None:
    given = for_six(plan([5, 4, 5]))
    stages = zip(given.stages, [again(0), again(2), again(4)], strict=True)
    given = replace(given, stages=tuple(replace(s, fates=fates) for s, fates in stages))
    check(given, READERS["megatron"](given.export("megatron"), 6))


@pytest.mark.parametrize("name", ["torch-csv", "jaxpp"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (3, 5), (4, 8), (4, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"])
def test_orders_of_any_size_are_said(
    name: str, devices: int, microbatches: int, schedule: str
) -> None:
    """JaxPP takes no backward of the first stage whose halves are apart."""
    given = sized(schedule, devices, microbatches)
    first = [word for line in order_of(given, microbatches) for word in line if word[0] == 0]
    parted = ["I", "W"] * microbatches != [kind for _, kind, _ in first if kind != "F"]
    if name == "jaxpp" and parted and "I" in [kind for _, kind, _ in first]:
        with pytest.raises(ValueError, match="lost would be the order of tasks of schedule v-half"):
            given.export(name)
    else:
        check(given, READERS[name](given.export(name), microbatches))
