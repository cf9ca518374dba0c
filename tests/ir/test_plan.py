"""Plans: from cuts, through JSON, and what a wrong one says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jvpipe.ir.plan import Fate, Plan, Stage


def test_cuts_become_stages() -> None:
    plan = Plan.from_cuts([5, 2, 2], schedule="gpipe")
    assert [stage.layers for stage in plan.stages] == [(0, 1, 2, 3, 4), (5, 6), (7, 8)]
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (2,)]
    assert plan.cuts == (5, 2, 2)
    assert [plan.stage_of(layer) for layer in (0, 4, 5, 8)] == [0, 0, 1, 2]
    assert (plan.schedule, plan.with_schedule("1f1b").schedule) == ("gpipe", "1f1b")


@pytest.mark.parametrize("name", [None, True, [], 3, b"1f1b"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    plan = Plan.from_cuts([1, 1])
    with pytest.raises(ValueError, match="schedule must be a name such as '1f1b', not "):
        plan.with_schedule(name)
    with pytest.raises(ValueError, match="unknown format "):
        plan.export(name)


def test_stages_may_share_a_device() -> None:
    plan = Plan.from_cuts([1, 1, 1], [0, 1, 0])
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,)]
    plan.check(layers=3, devices=2)


@pytest.mark.parametrize("cuts", [[], [2, 0], [3, -1], {1: 2}, {5, 2}, b"1f1b", "12"])
def test_a_stage_needs_a_layer(cuts: Any) -> None:
    with pytest.raises(
        ValueError, match=r"every stage needs at least one layer, but the cuts are [\[{b']"
    ):
        Plan.from_cuts(cuts)


@pytest.mark.parametrize(
    "devices", [2, {0: 1, 1: 0}, {0, 1}, [{0, 1}, 2], [0, 0.5], [0, None], [(0, True), 1], ["0", 1]]
)
def test_devices_are_whole_numbers(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"devices (of stage [01] )?must be"):
        Plan.from_cuts([1, 1], devices)


@pytest.mark.parametrize("stages", [(), (Stage((0,), ()),)])
def test_a_plan_without_devices_counts_none(stages: tuple[Stage, ...]) -> None:
    with pytest.raises(ValueError, match="have no devices: give at least one stage"):
        _ = Plan(stages).device_count


@pytest.mark.parametrize("stages", [[], {"0": 1}])
def test_a_plan_is_read_with_a_stage(stages: Any) -> None:
    with pytest.raises(ValueError, match="stages must be a list of at least one stage, not "):
        Plan.from_json({"stages": stages, "schedule": None, "planner": "me"})


def test_no_plan_has_so_many_layers() -> None:
    with pytest.raises(ValueError, match="have 1000000001 layers in total: use at most 1000000"):
        Plan.from_cuts([10**9, 1])


def test_a_stage_needs_a_device() -> None:
    with pytest.raises(ValueError, match="3 stages need 3 entries in devices, but it has 2"):
        Plan.from_cuts([1, 1, 1], [0, 1])


def test_round_trips_through_json(tmp_path: Path) -> None:
    plan = Plan(
        (Stage((0, 1), (1,), {"0:1": Fate.SWAP, "1:0": Fate.RECOMPUTE}), Stage((2,), (0,))),
        "gpipe",
        "torchgpipe",
    )
    stages = (replace(plan.stages[0], state_fates={"w": Fate.SWAP, "b": Fate.KEEP}), plan.stages[1])
    for each in (plan, replace(plan, stages=stages)):
        each.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == each


def test_the_file_can_be_read_and_written_by_hand(tmp_path: Path) -> None:
    stages = [{"layers": [0, 1], "devices": [0]}, {"layers": [2], "devices": [1]}]
    (tmp_path / "plan.json").write_text(
        json.dumps({"stages": stages, "schedule": "gpipe", "planner": "me"})
    )
    assert Plan.load(tmp_path / "plan.json") == Plan.from_cuts(
        [2, 1], schedule="gpipe", planner="me"
    )


STAGE = '{"stages": [{"layers": [0], "devices": [0]}], "schedule": null, "planner": "me", %s}'


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "{",
            "[]",
            "3",
            '{"stages": []}',
            '{"stages": [{"layers": ["x"], "devices": [0]}]}',
            "[" * 100_000,
        ],
        *[
            STAGE % changed
            for changed in (
                '"keep_last": "false"',
                '"splits": "12"',
                '"tasks": [1]',
                '"schedule": 3',
            )
        ],
        '{"stages": [{"layers": [0, 1.7], "devices": [0]}], "schedule": null, "planner": "me"}',
    ],
    ids=lambda text: text[-20:] or "nothing",
)
def test_another_file_is_not_a_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a plan that jvpipe saved: "):
        Plan.load(tmp_path / "other.json")


GOOD = Plan.from_cuts([2, 2])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan.from_cuts([2, 1]), r"lacks layers \[3\]: the model has layers 0 to 3"),
        (Plan.from_cuts([3, 2]), r"have layers \[0, 1, 2, 3, 4\]: they must have layers 0 to 3"),
        (
            Plan((Stage((0, 2), (0,)), Stage((1, 3), (1,)))),
            r"have layers \[0, 2, 1, 3\]: .* in order",
        ),
        (
            Plan((Stage((0, 1, 1), (0,)), Stage((2, 3), (1,)))),
            r"have layers \[0, 1, 1, 2, 3\]: .*each once",
        ),
        (Plan((*GOOD.stages, Stage((), (0,)))), "stage 2 needs at least one layer and one device"),
        (
            Plan((replace(GOOD.stages[0], devices=()), GOOD.stages[1])),
            "stage 0 needs at least one layer and one",
        ),
        (
            Plan((replace(GOOD.stages[0], fates={"0:0": ["swap"]}), GOOD.stages[1])),
            r"unknown fates \[\['swap'\]\]",
        ),
        (
            Plan.from_cuts([2, 2], [0, 2]),
            "stage 1 is on device 2, but the devices here are 0 to 1: .* name more in",
        ),
        (
            Plan.from_cuts([2, 2], [-1, 0]),
            "stage 0 is on device -1, but the devices here are 0 to 1",
        ),
        (
            Plan((replace(GOOD.stages[0], fates={"0:0": "drop"}), GOOD.stages[1])),
            r"stage 0 has unknown fates \['drop'\]: use keep, swap, recompute",
        ),
        (
            Plan((replace(GOOD.stages[0], state_fates={"w": "recompute"}), GOOD.stages[1])),
            r"state of stage 0 has unknown fates \['recompute'\]: use keep, swap",
        ),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(plan: Plan, message: str) -> None:
    GOOD.check(layers=4, devices=2)
    with pytest.raises(ValueError, match=message):
        plan.check(layers=4, devices=2)


def test_a_path_with_a_line_break_is_told_in_one_line(tmp_path: Path) -> None:
    for file in (tmp_path / "\u00e9\n", tmp_path):
        with pytest.raises(ValueError, match="cannot be read: ") as refused:
            Plan.load(file)
        assert "\n" not in str(refused.value)
        assert repr(str(file))[1:-1] in str(refused.value)
