"""A run that is prepared: what a resumed run takes from the run before."""

import json
from pathlib import Path

from jvpipe.cli.own_model import find_model
from tests.cli.test_found_model import OWN
from tests.commands import finished


def test_a_run_that_goes_on_under_another_schedule_has_the_rates_of_all_its_updates(
    tmp_path: Path,
) -> None:
    begin = ("--model", f"{OWN}:Plain", "--stages", "1", "--batch-size", "8", "--steps", "2")
    go_on = ("--resume", "--schedule", "pipedream", "--microbatches", "4", "--steps", "4")
    for more in (("--schedule", "gpipe", *begin), go_on):
        done = finished("--run-dir", str(tmp_path / "run"), *more)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    # Two steps with one update, and two steps with four.
    assert rates[2:] == find_model(f"{OWN}:Plain").learning_rates(10)[[5, 9]].tolist()
