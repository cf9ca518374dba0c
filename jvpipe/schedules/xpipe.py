"""XPipe (arXiv:1911.04610): forwards read the weights that their backwards are expected to find.

The order of tasks is that of PipeDream. w[n] are the weights after n updates. F<m> reads the
prediction w[c] + d u. Here c is the newest version, d is the number of updates until B<m>, and u is
what the last update added to the weights, whatever the optimizer (zero before the first update of
a stream, which ends when the pipeline is drained).
B<m> reads w[c + d]. In the paper, u is Adam's step, and the prediction that is made for the first
micro-batch of a batch is used for the whole batch.

Forwards that are recomputed for a backward read the backward's weights. A parameter that several
stages read is not predicted: a backward reads the version that its forward has read. This version
is kept until the backward, despite `stash=False`.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least


class XPipe(Schedule):
    """The schedule of XPipe, with an update every `update_every` micro-batches.

    >>> XPipe().predicts
    True
    """

    def __init__(self, *, update_every: int = 1) -> None:
        at_least(1, update_every=update_every)
        super().__init__(
            name="xpipe",
            lists=one_f_one_b,
            synchronous=False,
            update_every=update_every,
            stash=False,
            predicts=True,
        )
