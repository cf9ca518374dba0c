"""The cheapest path over cuts."""

from collections.abc import Callable
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.planners.model.paths import best_path


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 5), st.randoms(use_true_random=False), st.sampled_from([sum, max]))
def test_no_path_is_cheaper(n: int, stages: int, random: Random, how: Callable[..., float]) -> None:
    def grid() -> np.ndarray:
        free = [[b > a and random.random() < 0.8 for b in range(n)] for a in range(n)]
        return np.array([[float(random.randint(0, 9)) if ok else np.inf for ok in row] for row in free])

    grids = [grid() for _ in range(stages)]

    def cost(places: tuple[int, ...] | list[int]) -> float:
        return how(float(g[step]) for g, step in zip(grids, pairwise(places), strict=True))

    every = [(0, *inner, n - 1) for inner in combinations(range(1, n - 1), stages - 1)]
    least = min(map(cost, every), default=np.inf)
    path = best_path(grids, np.add if how is sum else np.maximum)
    assert (path is None) == np.isinf(least)
    if path is not None:
        assert cost(path) == pytest.approx(least)
