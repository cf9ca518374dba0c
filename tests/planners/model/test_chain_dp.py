"""Paths through matrices, against all paths."""

from collections.abc import Callable
from itertools import combinations, pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from jvpipe.planners.model.chain_dp import least_max, least_path, least_sum


def matrices(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    drawn = [draw.uniform(0, 9, size=size) for size in ((1, 4), (4, 3), (3, 5), (5, 1))]
    return [np.where(draw.uniform(size=x.shape) < 0.2, np.inf, x) for x in drawn]


def paths(given: list[np.ndarray]) -> list[tuple[tuple[int, ...], list[float]]]:
    every = product(*(range(len(x)) for x in given), range(1))
    return [
        (p, [float(x[a, b]) for x, (a, b) in zip(given, pairwise(p), strict=True)]) for p in every
    ]


@pytest.mark.parametrize("seed", range(8))
def test_paths_are_the_best_of_all(seed: int) -> None:
    drawn = matrices(seed)
    every = paths(drawn)
    total, path = least_sum(drawn)
    assert total == pytest.approx(min(sum(x) for _, x in every))
    assert least_max(drawn) == min(max(x) for _, x in every)
    assert path is None or total == pytest.approx(sum(dict(every)[path]))


def test_no_path_is_none() -> None:
    assert least_sum([np.array([[np.inf]])]) == (np.inf, None)


@settings(max_examples=30, deadline=None)
@over(
    st.integers(2, 6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.sampled_from([sum, max]),
)
def test_no_path_is_cheaper(n: int, stages: int, random: Random, how: Callable[..., float]) -> None:
    def grid() -> np.ndarray:
        free = [[b > a and random.random() < 0.8 for b in range(n)] for a in range(n)]
        return np.array(
            [[float(random.randint(0, 9)) if ok else np.inf for ok in row] for row in free]
        )

    grids = [grid() for _ in range(stages)]

    def cost(places: tuple[int, ...] | list[int]) -> float:
        return how(float(g[step]) for g, step in zip(grids, pairwise(places), strict=True))

    every = [(0, *inner, n - 1) for inner in combinations(range(1, n - 1), stages - 1)]
    least = min(map(cost, every), default=np.inf)
    total, path = least_path(grids, np.add if how is sum else np.maximum)
    assert (path is None) == np.isinf(least)
    if path is not None:
        assert cost(path) == total == pytest.approx(least)
