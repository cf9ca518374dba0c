"""A row of a small model."""

import pytest

from experiments.scaling import evenness, measured, run


def test_a_row_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STAGES", (1, 2))
    cells = run.Subject("vgg", "tiny", 2).row().split(" | ")
    assert cells[:2] == ["| vgg tiny", "2"]
    assert cells[2].endswith("(100%)")
    assert 10 < int(cells[3].split("(")[1].split("%")[0]) <= 100


def test_a_row_of_what_was_measured() -> None:
    assert (
        measured.row("one", [10.0, 19.0, 30.0]) == "| one | 10.0 (100%) | 19.0 (95%) | 30.0 (75%) |"
    )


@pytest.mark.thorough
def test_cuts_inside_layers_leave_no_stage_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evenness, "STAGES", 3)
    whole, inside, places, gain, _ = evenness.row(run.Subject("resnet", "50", 16)).split(" | ")[1:]
    assert 1 <= float(inside) < float(whole)
    assert int(places) > 0
    assert float(gain) > 1
