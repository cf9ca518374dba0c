"""Cuts for unequal devices are those of a search through all."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.planners.replanning import cuts_at_speeds

SECONDS = st.floats(0.1, 10.0)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(SECONDS, min_size=1, max_size=8))
def test_no_cuts_are_better(data: st.DataObject, layer_s: list[float]) -> None:
    stages = data.draw(st.integers(1, min(4, len(layer_s))))
    slowness = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    fixed_s = data.draw(st.lists(st.floats(0.0, 5.0), min_size=stages, max_size=stages))

    def key(bounds: tuple[int, ...]) -> tuple[float, float]:
        stages_s = [
            f * sum(layer_s[i:j]) + c
            for (i, j), f, c in zip(pairwise(bounds), slowness, fixed_s, strict=True)
        ]
        return max(stages_s), sum(stages_s)

    layers = len(layer_s)
    best = min(key((0, *inner, layers)) for inner in combinations(range(1, layers), stages - 1))
    places = np.arange(stages)
    found = cuts_at_speeds(np.array(layer_s), np.array(slowness), fixed_s, places)
    bounds = [0]
    for n in found:
        assert n >= 1
        bounds.append(bounds[-1] + n)
    assert bounds[-1] == layers
    assert key(tuple(bounds)) == pytest.approx(best)


def test_stages_of_a_device_make_up_for_each_other() -> None:
    # No stage is slower than the second layer. If only that counted, device 1 would take 8 of 10 s.
    layer_s = np.array([1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    places = np.array([0, 1, 0, 1])
    assert cuts_at_speeds(layer_s, np.ones(4), [0.0] * 4, places) == (1, 1, 4, 1)
