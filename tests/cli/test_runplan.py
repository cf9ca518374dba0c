"""Which plan a run follows."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jvpipe.cli import run_folder
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.run_folder import given_plan, kept_plan
from jvpipe.ir.plan import Plan

OPTIONS = TrainOptions(schedule="pipedream", stages=2)
PLAN = Plan.from_cuts([3, 1], schedule="pipedream")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run_folder.write_sealed(tmp_path / "plan.json", PLAN.to_json())
    return tmp_path / "plan.json"


def test_a_resumed_run_keeps_its_plan(path: Path) -> None:
    longer = replace(OPTIONS, resume=True, steps=7, adapt=True, export="parameters.safetensors")
    assert kept_plan(path, asdict(longer), asdict(OPTIONS)) == PLAN


@pytest.mark.parametrize(
    "other",
    [
        {"stages": 3},
        {"microbatches": 8},
        {"replicas": "2,1"},
        {"replicas": "auto"},
        {"schedule": "2bw"},
        {"planner": "vpipe"},
        {"memory_limit": "1MiB"},
        {"host_memory_limit": "1MiB"},
        {"checkpoint": "always"},
        {"plan": "another.json"},
        {"remeasure": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_with_other_options_it_is_planned_anew(other: dict[str, Any], path: Path) -> None:
    assert kept_plan(path, asdict(replace(OPTIONS, **other)), asdict(OPTIONS)) is None


def test_a_plan_of_other_options_that_a_killed_process_left_is_not_used(path: Path) -> None:
    resumed = asdict(replace(OPTIONS, stages=3))
    assert kept_plan(path, resumed, resumed) is None
    assert kept_plan(path.with_name("nothing.json"), asdict(OPTIONS), asdict(OPTIONS)) is None


def test_a_plan_whose_stages_were_decided_is_kept_whatever_their_number(path: Path) -> None:
    shared = replace(OPTIONS, stages=None, replicas="auto")
    assert kept_plan(path, asdict(shared), asdict(shared)) == PLAN


def test_a_given_plan_says_stages_and_schedule(path: Path) -> None:
    defaults = asdict(TrainOptions())
    assert given_plan(defaults, defaults) is None
    assert given_plan(asdict(TrainOptions(plan=str(path))), defaults) == PLAN
    assert given_plan(asdict(TrainOptions(plan=str(path), replicas="1:1")), defaults) == PLAN


def test_a_plan_that_a_run_before_was_given_is_not_given_again(path: Path) -> None:
    saved = asdict(replace(OPTIONS, plan=str(path)))
    assert given_plan(saved | {"stages": 3}, saved) is None
    assert kept_plan(path, saved, saved) == PLAN


@pytest.mark.parametrize(
    ("name", "value"), [("stages", 3), ("schedule", "2bw"), ("replicas", "2,1")]
)
def test_options_must_not_contradict_a_given_plan(name: str, value: Any, path: Path) -> None:
    given = asdict(TrainOptions(plan=str(path))) | {name: value}
    with pytest.raises(ValueError, match=f"--{name} {value} contradicts --plan .*, where it is"):
        given_plan(given, asdict(TrainOptions()))


def test_a_plan_that_names_no_schedule_runs_under_any(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    Plan.from_cuts([2, 1]).save(path)
    options = asdict(TrainOptions(plan=str(path), schedule="gpipe"))
    assert given_plan(options, asdict(TrainOptions())) == Plan.from_cuts([2, 1])
