"""What is given of a plan is kept, and what no plan can have is told with its cure."""

import pytest

from jvpipe.planners.model.pins import Pins

PLAN = (0, 2, 6), (2, 1), 4


@pytest.mark.parametrize(
    ("pins", "allowed"),
    [
        (Pins(), True),
        (Pins(stages=2, replicas=(2, 1), cuts=(2, 4), size=4), True),
        (Pins(stages=3), False),
        (Pins(replicas=(1, 2)), False),
        (Pins(cuts=(3, 3)), False),
        (Pins(size=8), False),
    ],
)
def test_plans_have_what_is_given(pins: Pins, allowed: bool) -> None:
    assert pins.allow(*PLAN) == allowed


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (Pins(stages=3, replicas=(2, 1)), r"stages=3, replicas=\(2, 1\) .* give as many of each"),
        (Pins(replicas=(4, 1)), r"take 5 devices, there are 4: use fewer replicas"),
        (Pins(replicas=(2, 0)), "one device and one layer for each"),
        (Pins(stages=5), "there can be 1 to 4"),
        (Pins(cuts=(2, 3)), r"cuts \(2, 3\) are of 5 layers, the model has 6"),
        (Pins(size=3), "micro-batches of 3: they must divide the batch of 8"),
        (Pins(replicas=(3, 1), size=2), "3 replicas cannot share micro-batches of 2 examples"),
    ],
)
def test_what_no_plan_has_is_refused_with_the_cure(pins: Pins, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pins.check(devices=4, batch=8, layers=6)
