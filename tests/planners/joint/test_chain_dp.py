"""Paths through matrices, against all paths."""

from itertools import pairwise, product

import numpy as np
import pytest

from jvpipe.planners.joint.chain_dp import least_max, least_sum, sums_through


def matrices(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    drawn = [draw.uniform(0, 9, size=size) for size in ((1, 4), (4, 3), (3, 5), (5, 1))]
    return [np.where(draw.uniform(size=x.shape) < 0.2, np.inf, x) for x in drawn]


def paths(given: list[np.ndarray]) -> list[tuple[tuple[int, ...], list[float]]]:
    every = product(*(range(len(x)) for x in given), range(1))
    return [(p, [float(x[a, b]) for x, (a, b) in zip(given, pairwise(p), strict=True)]) for p in every]


@pytest.mark.parametrize("seed", range(8))
def test_paths_are_the_best_of_all(seed: int) -> None:
    drawn = matrices(seed)
    every = paths(drawn)
    total, path = least_sum(drawn)
    assert total == pytest.approx(min(sum(x) for _, x in every))
    assert least_max(drawn) == min(max(x) for _, x in every)
    assert path is None or total == pytest.approx(sum(dict(every)[path]))
    for bound, sums in enumerate(sums_through(drawn)):
        for place, least in enumerate(sums):
            assert least == pytest.approx(min(sum(x) for p, x in every if p[bound] == place))


def test_no_path_is_none() -> None:
    assert least_sum([np.array([[np.inf]])]) == (np.inf, None)
