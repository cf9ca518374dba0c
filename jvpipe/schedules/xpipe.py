"""XPipe (arXiv:1911.04610): forwards read the weights that their backwards are expected to find.

In the order of PipeDream, F<m> reads w[c] + d u, where c is the newest version, d = m - c the
updates until B<m>, and u the last applied update (nothing before the first); B<m> reads w[m]. (The
paper's u is Adam's step, predicted for a whole batch from its first micro-batch; here it is
whatever the optimizer did.) What is recomputed for a backward reads the backward's weights. A
parameter that several stages read is neither predicted nor read newer: it is stashed.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least


def _and_prediction(stage: int, stages: int) -> int:
    return 1 + 2 * (stage < stages - 1)  # u, and the predicted weights while a forward runs


class XPipe(Schedule):
    """XPipe.

    >>> XPipe().predicts
    True
    """

    def __init__(self, *, update_every: int = 1) -> None:
        at_least(1, update_every=update_every)
        super().__init__(
            name="xpipe",
            lists=one_f_one_b,
            synchronous=False,
            versions=_and_prediction,
            update_every=update_every,
            stash=False,
            predicts=True,
        )
