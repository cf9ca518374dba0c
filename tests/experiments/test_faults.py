"""A small sample of experiments/faults."""

import random
from pathlib import Path

import pytest

from experiments.faults.kills import OWN, killed, undisturbed


@pytest.mark.thorough
def test_a_killed_run_goes_on_to_the_bit_under_the_plan_that_it_had(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, (*OWN, "--schedule", "pipedream"))
    outcome = killed(whole, "killed", 1, random.Random(2))
    assert not outcome.wrong
    assert len(outcome.killed_at) == 1
