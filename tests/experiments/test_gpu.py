"""The first hour on a GPU runs whole on a CPU, part by part, and no case that fails ends a part."""

from typing import Any

import jax
import pytest

import jvpipe
from experiments.gpu.case import found, is_of_memory
from experiments.gpu.run import PARTS, Case, main, table
from tests.grid import grid


def here(case: Case, left_s: float) -> dict[str, Any]:
    """Measures in this process; what JAX cannot compile on a CPU is refused as it would be in a
    child.
    """
    assert left_s > 0
    steps = {"steps": 1} if case.measure in ("pipeline", "plain") else {}
    try:
        return found("toy", case.measure, {**case.arguments, **steps})
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(str(error).splitlines()[0]) from None


@pytest.mark.thorough
@pytest.mark.parametrize("part", grid(PARTS, "copies", "ledger"))
def test_a_part_runs_on_a_cpu(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([part, "toy"], here)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"## {part}: ")
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) == len(PARTS[part][1])
    measured = [row for row in rows if "failed" not in row or "offload" not in row]
    assert not [row for row in measured if "failed" in row or "no time" in row]
    if part in ("bits", "deterministic", "untuned"):
        assert all(row.rstrip(" |").endswith("yes") for row in rows)


def test_what_fails_and_what_does_not_fit_are_lines() -> None:
    def run(case: Case, left_s: float) -> dict[str, Any]:
        if case.label == "broken":
            raise RuntimeError("the driver is gone")
        return {"fits": False} if case.label == "large" else {"step_s": 0.5}

    cases = [Case(label, "plain") for label in ("broken", "large", "whole")]
    assert list(table(cases, run, 1)) == [
        "| broken | failed: the driver is gone |",
        "| large | does not fit |",
        "| | step ms |\n|---|---|",
        "| whole | 500.000 |",
    ]


def test_the_largest_is_what_was_found_when_time_ran_out() -> None:
    def run(case: Case, left_s: float) -> dict[str, Any]:
        if case.arguments["micro"] > 4:
            raise RuntimeError("the process was killed")
        return {"step_s": 1.0}

    (_, row) = table([Case("keep", "pipeline", seeks=True)], run, 4)
    assert row == "| keep | 4 | failed: the process was killed | 1000.000 |"


def test_memory_that_is_missing_is_known_behind_a_stage_error() -> None:
    exhausted = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    named = jvpipe.StageError("stage 0, 1F0")
    named.__cause__ = exhausted
    assert is_of_memory(named)
    assert not is_of_memory(jvpipe.StageError("stage 0, 1F0"))


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match="unknown part 'leger': there are copies, ahead, ledger"):
        main(["leger", "toy"])
