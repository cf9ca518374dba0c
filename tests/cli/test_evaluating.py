"""The best of a run's evaluations, and when there were enough without a better one."""

import json
import math
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cli.job import Job
from jvpipe.cli.keeping import Evaluations, held_out_loss
from jvpipe.cli.processes import Watch


def after(*losses: float) -> Evaluations:
    seen = Evaluations()
    for step, loss in enumerate(losses, 1):
        seen = seen.after(step, loss)
    return seen


@pytest.mark.parametrize(
    ("losses", "best_step", "since"),
    [
        ((3.0,), 1, 0),
        ((3.0, 2.0, 2.0, 2.5), 2, 2),
        ((math.nan, 3.0, math.nan, math.inf), 2, 2),
        ((math.nan, math.inf), 0, 2),
        ((0.0, -1.0), 2, 0),
    ],
)
def test_the_first_of_the_least_is_the_best(
    losses: tuple[float, ...], best_step: int, since: int
) -> None:
    seen = after(*losses)
    assert (seen.best_step, seen.since) == (best_step, since)
    assert seen.best_loss == (losses[best_step - 1] if best_step else None)
    assert Evaluations(**json.loads(json.dumps(seen.to_json(), allow_nan=False))) == seen


def test_a_run_is_over_after_so_many_that_were_no_better() -> None:
    assert [after(*[1.0] * n).over(2) for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert not after(*[1.0] * 9).over(None)
    assert "stopped early, as 2 evaluations since were no better" in after(1.0, 2.0, 2.0).told(2)
    assert "stopped" not in after(1.0, 2.0).told(2)
    assert (Evaluations().told(1), Evaluations().to_json()) == ("", {})


def loss_of(loss_fn: Any, *held_out: Any) -> float | None:
    params = [np.float32(1 + i) for i in range(3)]
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=2, microbatches=2, planner="even")
    state = pipe.init(params, held_out[0], None)
    job = mock.Mock(spec=Job, pipe=pipe, data=mock.Mock(held_out=held_out))
    return held_out_loss(job, state, mock.Mock(spec=Watch))


def each_of(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for w in params:
        x = jnp.sin(w * x)
    return x


def weighted(params: Any, batch: Any, rng: Any) -> jvpipe.Weighted:
    return jvpipe.Weighted(jnp.sum(each_of(params, batch) * batch["w"]), jnp.sum(batch["w"]))


def plain(params: Any, batch: Any, rng: Any) -> Any:
    return jnp.mean(each_of(params, batch))


def batch_of(*values: float, weights: int) -> dict[str, np.ndarray]:
    counted = np.arange(len(values)) < weights
    return {"x": np.array(values, np.float32), "w": counted.astype(np.float32)}


def test_held_out_batches_count_by_their_weights_or_examples() -> None:
    many, few, none = (batch_of(*[x] * 4, weights=n) for x, n in ((1, 4), (2, 1), (3, 0)))
    a, b = (float(each_of((1, 2, 3), batch)[0]) for batch in (many, few))
    assert loss_of(weighted, many, few, none) == pytest.approx((4 * a + b) / 5)
    assert math.isnan(loss_of(weighted, none) or 0)
    short = batch_of(2, 2, weights=0)
    assert loss_of(plain, many, short) == pytest.approx((4 * a + 2 * b) / 6)
