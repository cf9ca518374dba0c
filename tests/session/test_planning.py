"""What planners are asked, and whether a limit can be kept, whatever a clock says: a sample of
experiments/limits.
"""

import random
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from experiments.limits.run import Question, asked_limits
from jvpipe.cost import links, measure
from jvpipe.cost.hardware import Link
from jvpipe.cost.links import Links
from tests.grid import grid
from tests.zoo import CASES


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stages", "schedule", "planner"),
    grid([ours := (3, "1f1b", "jvpipe"), (2, "gpipe", "torchgpipe")], ours),
)
def test_a_limit_is_answered_alike_whatever_the_seconds(
    stages: int, schedule: str, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_seconds", lambda *_: [1e-3, 1e-3])
    question = Question(CASES["mlp"](), stages, schedule, planner, random.Random(0))
    asked = list(asked_limits(question, 1))
    assert [question.wrong(limit) for limit in asked] == [""] * len(asked)
    assert len(question.smallest) == 1


def test_where_the_order_is_open_a_limit_below_1f1bs_smallest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_seconds", lambda *_: [1e-3, 1e-3])
    smallest = dict[str, int]()
    for schedule in ("1f1b", "auto"):
        # Without state, which on the host leaves parameters and gradients alone to set what is
        # smallest.
        question = Question(
            CASES["mlp"](), 3, schedule, "jvpipe", random.Random(0), optax.sgd(1e-2)
        )
        assert question.held_bytes(1) is None
        (smallest[schedule],) = question.smallest
        held = question.held_bytes(smallest[schedule])
        assert held is not None
        assert held <= smallest[schedule]
    assert smallest["auto"] < smallest["1f1b"]


WIDTHS = (8, 8, 64, 8, 8)


def waisted(params: Any, batch: Any, rng: Any) -> jax.Array:
    """Four layers alike in seconds; what the second gives on is eight times as wide as what the
    others do.
    """
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("planner", ["jvpipe", "dapple"])
@pytest.mark.parametrize(("bytes_per_s", "crossing"), [(1e12, 64), (1e6, 8)])
def test_links_between_devices_are_measured_and_counted(
    planner: str, bytes_per_s: float, crossing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_seconds", lambda *_: [1e-4, 1e-4])
    send = Link(bytes_per_s)
    monkeypatch.setattr(links, "known_links", dict)
    monkeypatch.setattr(
        links, "measure_links", lambda *_: Links(Link(1e9), Link(1e9), send, send_uses_host=False)
    )
    params = [np.ones(shape, np.float32) for shape in pairwise(WIDTHS)]
    pipe = jvpipe.Pipeline(
        waisted, optax.sgd(0.1), 2, 4, planner=planner, devices=jax.devices()[:2]
    )
    pipe.init(params, {"x": np.ones((8, WIDTHS[0]), np.float32)}, None)
    assert pipe.session.compiled_plans.planned is not None
    assert pipe.session.compiled_plans.planned.problem.peer == send
    assert WIDTHS[pipe.plan.cuts[0]] == crossing
