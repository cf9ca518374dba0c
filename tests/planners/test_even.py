"""Even: as many layers per stage, give or take one."""

import pytest

from jvpipe.planners.even import even


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"), [(6, 3, [2, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_the_first_stages_take_what_is_left_over(layers: int, stages: int, cuts: list[int]) -> None:
    assert even([1.0] * layers, stages) == cuts
