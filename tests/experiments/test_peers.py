"""The parts of experiments/peers that need no other environment."""

import dataclasses
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.peers import by_jit, by_jvpipe, run, work
from experiments.throughput.data import transformer_params


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "reference.npz"
    with jax.numpy_rank_promotion("allow"):
        work.save(str(path), by_jit.ready("loop", work.TINY))
    return path


def told(made: work.Ready, reference: Path) -> float:
    found = work.told(made, Namespace(reference=str(reference), warm=0, steps=1))
    assert found["arrays"] == len(work.named(transformer_params(work.TINY)))
    assert found["step_s"] > 0
    return found["error"]


@pytest.mark.thorough
def test_all_compute_the_same(reference: Path) -> None:
    with jax.numpy_rank_promotion("allow"):
        assert told(by_jit.ready("scan", work.TINY), reference) < 1e-5
        made, cuts = by_jvpipe.ready("1f1b", 2, work.TINY)
        assert len(cuts) == 2
        assert told(made, reference) < 1e-5


def test_a_wrong_gradient_or_loss_is_seen(reference: Path) -> None:
    with np.load(reference) as kept:
        right = dict(kept)
    made = work.Ready(lambda: None, float(right.pop("loss")), right)
    assert told(made, reference) == 0
    wrong = right | {"lnf": right["lnf"] * np.float32(1.01)}
    assert told(dataclasses.replace(made, gradients=wrong), reference) == pytest.approx(
        0.01, rel=1e-3
    )
    assert told(dataclasses.replace(made, loss=made.loss * 0.9), reference) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match="pos"):
        told(dataclasses.replace(made, gradients=right | {"pos": right["pos"] * np.nan}), reference)


def test_the_table_is_of_medians_over_the_best_peer() -> None:
    ways = [
        way for way in run.WAYS if way.name in ("jvpipe, one stage", "JaxPP, 1F1B", "torch, 1F1B")
    ]
    assert len(ways) == 3
    found = {
        way: [{"step_s": (i + 1) * x, "error": 1e-7, "cuts": [3]} for x in (1, 9, 2)]
        for i, way in enumerate(ways)
    }
    assert run.rows(found)[2:] == [
        "| jvpipe, one stage | 2.000 | 1.000, 9.000 | 0.50 | 1e-07 | [3] |",
        "| JaxPP, 1F1B | 4.000 | 2.000, 18.000 | 1.00 | 1e-07 | [3] |",
        "| torch, 1F1B | 6.000 | 3.000, 27.000 | 1.50 | 1e-07 | [3] |",
    ]


def test_every_way_names_a_script() -> None:
    for script in {way.script for way in run.WAYS}:
        assert find_spec(f"experiments.peers.{script}")
