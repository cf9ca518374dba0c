"""PipeDream-2BW (ICML 2021): the order of PipeDream, one update per step, two versions.

The micro-batches of step b read version max(0, b - 1), forward and backward; its update makes
version b + 1 from version b. So every update is one version late, at one stage too.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule


def _two(stage: int, stages: int) -> int:
    return 2


class TwoBW(Schedule):
    """PipeDream-2BW.

    >>> TwoBW().versions(0, 8)
    2
    """

    def __init__(self) -> None:
        super().__init__(
            name="2bw", lists=one_f_one_b, synchronous=False, versions=_two, rule="one behind"
        )
