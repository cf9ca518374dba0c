"""Options of a plan that cannot be are refused before any work, with what is wrong about them."""

from typing import Any

import pytest

from jvpipe.cli.plan_options import Options, check
from jvpipe.papers.registry import PLANNERS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "give one of --model and --graph"),
        ({"model": "bert", "graph": "x.txt"}, "give one of --model and --graph"),
        (
            {"graph": "x.txt", "batch_size": 8},
            "--batch-size 8 is of a --model, a --graph has its own: leave it out",
        ),
        ({"graph": "x.txt", "set": ("blocks=3",)}, "--set blocks=3 is of a --model"),
        ({"model": "bert", "sequence_length": 0}, "--sequence-length 0: there must be 1 to"),
        ({"model": "bert", "batch_size": 0}, "--batch-size 0: there must be 1 to"),
        ({"model": "bert", "stages": 10**6}, "--stages 1000000: there must be 1 to 100000"),
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
        check(Options(**options))


def test_the_planners_that_are_asked() -> None:
    assert check(Options(model="bert")) == ["jvpipe"]
    assert check(Options(model="bert", compare="even,dapple")) == ["even", "dapple"]
    assert len(check(Options(model="bert", compare="all"))) == len(PLANNERS)
