"""What batches and losses tell of themselves, for the log."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvpipe import models
from jvpipe.cli.step_log import Done, StepLog, tokens_in
from jvpipe.report.metrics import scalars_in
from tests.cli.test_found_model import OWN
from tests.commands import finished


@pytest.mark.parametrize(
    ("name", "tokens"), [("bert", 4 * 16), ("gpt2", 4 * 16), ("t5", 4 * 2 * 8)]
)
def test_the_tokens_that_models_read_are_counted(name: str, tokens: int) -> None:
    assert tokens_in(models.load(name, "tiny").abstract_batch(4)) == tokens


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": np.ones((2, 3), np.float32)},
        {"inputs": np.ones(2, np.int32)},
        {"targets": np.ones((2, 3), np.int32)},
        np.ones((2, 3), np.int32),
    ],
)
def test_what_is_no_text_has_none(batch: Any) -> None:
    assert tokens_in(batch) is None
    assert tokens_in(models.load("amoebanet", "tiny").abstract_batch(4)) is None


def test_the_batch_of_each_step_is_counted(tmp_path: Path) -> None:
    model = ("--model", f"{OWN}:Varies", "--batch-size", "4", "--stages", "1", "--steps", "2")
    done = finished(*model, "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    per_s = ("examples_per_s", "tokens_per_s")
    counts = [[round(line[name] * line["seconds"]) for name in per_s] for line in lines]
    assert counts == [[4, 4 * 5], [8, 8 * 10]]


def test_single_numbers_are_told_by_their_path() -> None:
    aux = {"moe": [{"balance": np.float32(0.5)}, {"balance": 2}], "logits": np.zeros((2, 2))}
    assert scalars_in(aux) == {"moe/0/balance": 0.5, "moe/1/balance": 2.0}
    assert scalars_in(np.float32(3)) == {"aux": 3.0}
    assert scalars_in(()) == {}


def test_a_step_whose_logging_has_failed_is_not_logged_again() -> None:
    log: Any = object.__new__(StepLog)
    first, second = (Done(step, {}, 1, None, ()) for step in range(2))
    told: list[Done] = []

    def tell(done: Done, **_: Any) -> None:
        told.append(done)
        if done is first:
            raise ValueError("the tracker takes nothing")

    vars(log).update(_dispatched=first, _tell=tell)
    with pytest.raises(ValueError, match="tracker"):
        log.dispatched(second)
    log.failed()
    assert told == [first, second]
