"""A small sample of experiments/faults."""

import random
from pathlib import Path

from experiments.faults.kills import killed, undisturbed

OPTIONS = ("--schedule", "pipedream", "--stages", "2", "--steps", "12", "--checkpoint-every", "1")


def test_a_killed_stream_goes_on_to_the_bit_under_the_plan_that_it_had(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, OPTIONS)
    outcome = killed(whole, "killed", 2, random.Random(2))
    assert not outcome.wrong
    assert 1 <= len(outcome.killed_at) <= 2
