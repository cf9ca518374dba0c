"""Options of a plan that cannot be are refused before any work, with what is wrong about them."""

from typing import Any

import pytest

from jvpipe.cli.plan_command import PlanOptions
from jvpipe.papers.registry import PLANNERS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "give one of --model and --graph"),
        ({"model": "bert", "graph": "x.txt"}, "give one of --model and --graph"),
        (
            {"graph": "x.txt", "batch_size": 8},
            "--batch-size 8 is for --model and cannot change the graph file of --graph: leave it out",
        ),
        ({"graph": "x.txt", "set": ("blocks=3",)}, "--set blocks=3 is for --model"),
        (
            {"model": "bert", "sequence_length": 0},
            "--sequence-length must be a whole number of at least 1, not 0",
        ),
        (
            {"model": "bert", "batch_size": 0},
            "--batch-size must be a whole number of at least 1, not 0",
        ),
        (
            {"model": "bert", "stages": 10**6},
            "--stages must be a whole number of at most 100000, not 1000000",
        ),
        (
            {"model": "bert", "schedule": "2bw", "microbatches": 1},
            "2bw on 2 stages needs at least 2 micro-batches",
        ),
        ({"model": "bert", "compare": "even,none"}, "none"),
        ({"model": "bert", "figure": "x.exe"}, "exe"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PlanOptions(**options).check()


def test_the_planners_that_are_asked() -> None:
    assert PlanOptions(model="bert").check() == ["jvpipe"]
    assert PlanOptions(model="bert", compare="even,dapple").check() == ["even", "dapple"]
    assert len(PlanOptions(model="bert", compare="all").check()) == len(PLANNERS)
