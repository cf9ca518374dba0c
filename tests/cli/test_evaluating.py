"""The best of a run's evaluations, and when there were enough without a better one."""

import json
import math

import pytest

from jvpipe.cli.keeping import Evaluations


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
