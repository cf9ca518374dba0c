"""The simulated table of schedules: a few rows, and that mistakes are told."""

from dataclasses import replace
from functools import partial

import pytest

from experiments.schedules import run
from experiments.schedules.cases import Case, drawn, drawn_cases
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.stage_cost import evaluate_decision


@pytest.fixture(scope="module")
def rows() -> list[run.Row]:
    made = partial(drawn, 2, 4, (1.3, 0.7), 0.1, True, layers=8)
    return [run.row_of(Case("uneven", "S 2, M 4", made, share)) for share in (None, 0.6)]


def test_rows_of_drawn_models_are_there_once() -> None:
    cases = list(drawn_cases())
    assert (
        len(cases)
        == len({(case.group, case.name, case.share) for case in cases})
        == 3 * 3 * 2 * 3 * 2 * 3
    )


def test_a_send_takes_its_share_of_a_devices_forward() -> None:
    problem = drawn(4, 4, (1.0, 1.0), 0.2, uneven=False)
    stages = evaluate_decision(problem, Decision.keeping_all([0, 8, 16, 24, 32])).stages
    assert stages[1].comm_s / 2 == pytest.approx(0.2 * stages[1].forward_s)


@pytest.mark.thorough
def test_auto_is_no_slower_than_any_family_and_keeps_the_limit(rows: list[run.Row]) -> None:
    free, tight = rows
    assert set(free.planned) == {schedule.name for schedule in run.FAMILIES} | {run.AUTO}
    for row in rows:
        assert row.over_best() <= run.SAME
        assert row.over_1f1b("1f1b") == 1.0
    assert all(one.peak_bytes <= 0.6 * tight.full_bytes for one in tight.planned.values())
    assert free.planned["1f1b"].peak_bytes == free.full_bytes


@pytest.mark.thorough
def test_tables_have_a_line_per_family_and_limit(rows: list[run.Row]) -> None:
    assert len(list(run.families_table(rows))) == 2 + sum(len(row.planned) for row in rows)
    assert len(list(run.auto_table(rows, lambda row: row.name))) == 4


@pytest.mark.thorough
def test_a_slower_auto_is_a_mistake(rows: list[run.Row]) -> None:
    tight = rows[1]
    usual = tight.planned["1f1b"]
    slow = replace(
        tight, planned={"1f1b": usual, run.AUTO: replace(usual, step_s=1.01 * usual.step_s)}
    )
    wrong = run.mistakes([slow])
    assert len(wrong) == 2
    assert wrong[0].startswith("auto takes 1.0100 of the best")
    fast = replace(
        tight, planned={"1f1b": usual, run.AUTO: replace(usual, step_s=0.85 * usual.step_s)}
    )
    assert not run.mistakes([fast])
