"""Formats, schedules and workloads: what is exported says the plan, to readers of the formats' own definitions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from jvpipe import Forecast, models, plan_for
from jvpipe.exports.format import outline_for
from jvpipe.exports.registry import FORMATS
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.ir.task import Task
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import Interleaved
from tests.exports.plans import again, outline, plan
from tests.exports.readers import READERS, Said, whole

GOLDEN = Path(__file__).with_name("golden")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "auto", "pipedream")
REASON = (
    r"cannot say all of this plan; lost would be |nothing near|the model is no embedding|"
    r"blocks of the model are not alike|blocks are too few"
)


def order_of(given: Plan, microbatches: int) -> list[list[tuple[int, str, int]]]:
    """The order of a plan, device by device."""
    name = given.schedule or ""
    chunks = len(given.stages) // given.device_count
    rule = Interleaved(chunks=chunks) if name == f"interleaved-{chunks}" else find_schedule(name)
    lists = [[Task.parse(word) for word in line.split()] for line in given.tasks] or rule.tasks(
        given.device_count, microbatches
    )
    rows = {given.stages[row[0].stage].devices[0]: row for row in lists}
    return [[(t.stage, str(t.kind), t.microbatch) for t in rows[d]] for d in sorted(rows)]


def blocks_of(given: Plan, there: Outline) -> list[list[int]]:
    """The blocks of each stage, whose cuts must be between them; what has no number goes with what is beside it."""
    number = [layer.block[1] if layer.block else None for layer in there.layers]
    bounds = pairwise(accumulate(given.cuts, initial=0))
    stages = [sorted({k for k in number[a:b] if k is not None}) for a, b in bounds]
    assert sum(map(len, stages)) == len({k for k in number if k is not None}), "a block is cut"
    return stages


def check(given: Plan, said: Said) -> None:
    """Asserts that a file says a plan, in all that it is about."""
    there = outline_for(given)
    assert said.ranks == [stage.devices[0] for stage in given.stages]
    assert said.order is not None
    assert list(whole(said.order)) == list(whole(order_of(given, there.microbatches)))
    if said.blocks is not None:
        assert said.blocks == blocks_of(given, there)
    if said.marks is not None:
        names = [layer.name for layer in there.layers]
        assert said.marks == [names[end - 1] for end in accumulate(given.cuts)]
    dropped = {name for stage in given.stages for name, fate in stage.fates.items()}
    assert all(fate == Fate.RECOMPUTE for stage in given.stages for fate in stage.fates.values())
    told = {
        name
        for layer in there.layers
        if layer.block and layer.block[1] in (said.again or ())
        for name in (*layer.values, *layer.inner)
    }
    assert told == dropped


@cache
def planned(workload: str, schedule: str) -> Plan:
    """Our plan of a workload at its mini size on two devices."""
    work = models.load(workload, "mini")
    found = plan_for(
        work.loss_fn,
        work.init,
        work.abstract_batch(work.batch_size),
        2,
        hardware="h100",
        microbatches=4,
        schedule=schedule,
        optimizer=work.optimizer(work.steps),
        model_state=work.initial_state(),
        has_aux=work.has_aux,
        has_state=work.has_state,
    )
    assert isinstance(found, Forecast)
    return found.plan


@pytest.mark.parametrize("workload", ["gpt2", "vgg"])
@pytest.mark.parametrize("schedule", SCHEDULES)
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


def test_the_table_has_both_kinds_of_cells() -> None:
    """Of GPT-2, whose plans are of a stack: what each format must be able to say."""
    said = {"megatron": "1f1b", "torchtitan": "gpipe", "maxtext": "gpipe"}
    for name, schedule in said.items():
        assert READERS[name](planned("gpt2", schedule).export(name), 4).blocks
    for schedule in SCHEDULES[:-2]:
        for name in ("torch-csv", "jaxpp"):
            assert planned("vgg", schedule).export(name)
    with pytest.raises(
        ValueError, match=r"backwards of a split stage stay whole: those of layers \[8\]"
    ):
        planned("vgg", "auto").export("torch-csv")
    with pytest.raises(ValueError, match="updates before the step ends: schedule pipedream"):
        planned("vgg", "pipedream").export("torch-csv")


CASES: dict[str, tuple[Plan, Sequence[str]]] = {
    "even-1f1b": (plan([5, 4, 5]), ("megatron", "torchtitan", "torch-csv", "jaxpp")),
    "uneven-gpipe": (plan([3, 6, 5], "gpipe"), ("torchtitan", "torch-csv", "jaxpp")),
    "even-gpipe": (plan([5, 4, 5], "gpipe"), ("maxtext",)),
    "interleaved": (plan([3, 4, 2, 5], "interleaved"), ("megatron", "torchtitan", "torch-csv")),
    "three-chunks": (
        Plan.from_cuts(
            [3, 2, 2, 2, 2, 3], [0, 1, 0, 1, 0, 1], schedule="interleaved-3", outline=outline()
        ),
        ("megatron", "torchtitan", "torch-csv", "jaxpp"),
    ),
    "inside-zb-h1": (plan([4, 5, 5], "zb-h1"), ("torch-csv", "jaxpp")),
    "vee": (plan([3, 2, 2, 2, 2, 3], "zb-v"), ("torch-csv", "jaxpp")),
    "other-devices": (
        Plan.from_cuts([5, 4, 5], [2, 0, 1], schedule="1f1b", outline=outline()),
        ("torch-csv", "jaxpp"),
    ),
    "one-stage": (plan([14]), ("megatron", "torchtitan", "torch-csv")),
}
GIVEN = [(case, name) for case, (_, names) in CASES.items() for name in names]


def for_six(given: Plan) -> Plan:
    """The plan, for six micro-batches."""
    return replace(given, outline=outline(6, microbatches=6))


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
    rule = find_schedule(schedule)
    stages = rule.stages_on(devices)
    given = replace(
        plan([1] * (stages - 1) + [15 - stages], schedule),
        outline=outline(6, microbatches=microbatches),
    )
    check(given, READERS[name](given.export(name), microbatches))
