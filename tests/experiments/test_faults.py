"""A small sample of experiments/faults."""

import random
from pathlib import Path

import pytest

from experiments.faults.kills import OWN, killed, undisturbed

OPTIONS = ("--schedule", "pipedream", "--stages", "2", "--steps", "12", "--checkpoint-every", "1")


@pytest.mark.parametrize(("options", "kills"), [(OPTIONS, 2), (OWN, 1)])
def test_a_killed_run_goes_on_to_the_bit_under_the_plan_that_it_had(
    options: tuple[str, ...], kills: int, tmp_path: Path
) -> None:
    whole = undisturbed(tmp_path, options)
    outcome = killed(whole, "killed", kills, random.Random(2))
    assert not outcome.wrong
    assert 1 <= len(outcome.killed_at) <= kills
