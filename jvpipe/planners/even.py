"""Even: the same number of layers per stage, give or take one."""

from collections.abc import Sequence


def even(costs: Sequence[float], stages: int) -> list[int]:
    """Layers per stage; the first stages take one more where it does not divide.

    >>> even([1.0] * 7, 3)
    [3, 2, 2]
    """
    each, more = divmod(len(costs), stages)
    return [each + (s < more) for s in range(stages)]
