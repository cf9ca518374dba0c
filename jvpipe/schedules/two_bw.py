"""PipeDream-2BW (ICML 2021): the order of PipeDream, with one update per step and two versions.

Version n of the weights is the version after n updates. The forwards and backwards of step b read
version max(0, b - 1). The update of step b makes version b + 1 from version b. So from step 1 on,
gradients are one version older than the weights that they update, even with a single stage.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule


class TwoBW(Schedule):
    """The schedule of PipeDream-2BW.

    >>> TwoBW().versions(0, 8)
    2
    """

    def __init__(self) -> None:
        super().__init__(
            name="2bw",
            lists=one_f_one_b,
            synchronous=False,
            rule="one behind",
        )
