"""PipeMare (MLSys 2021): an asynchronous schedule that keeps one version of the weights.

A backward finds newer weights than its forward has read; technique T2 corrects this. The order of
tasks is that of PipeDream. If an update follows each B, F<m> on stage s of S reads version
max(0, m - tau), and B<m> reads version m, where tau = S - 1 - s. (The paper's tau,
(2 (S - s) + 1) / N with N micro-batches, is for a pipeline in which more tasks lie between a
forward and its update.) If an update follows every n-th B, tau is ceil((S - 1 - s) / n). The paper
has three techniques. Here K is `anneal_updates`, D is `decay`, and w[t] is version t of the
weights w:

    T1  update t, counted from 0, is divided by tau ** (1 - t / K) if tau > 0 and t < K
    T2  B reads w - tau delta if tau > 0; each update changes delta, a mean of updates, to
        gamma delta + (1 - gamma) (w[t + 1] - w[t]), where gamma = D ** (1 / tau)
    T3  the first `warmup_updates` are synchronous, under 1F1B, one per step

A stream ends when the pipeline is drained. The next stream begins with t = 0 and delta = 0.
Forwards that are recomputed for a backward read the backward's weights. So under this schedule the
results of training depend on which layers a plan recomputes. A parameter that several stages read
is not corrected: these stages all read the version that the first of them has read. This version is
stashed until the backward.
"""

from numbers import Real

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least
from jvpipe.util.brief import brief


class PipeMare(Schedule):
    """The schedule of PipeMare with its three techniques, T1, T2 and T3.

    >>> PipeMare(decay=0.5, warmup_updates=100).decay
    0.5
    """

    def __init__(
        self,
        *,
        decay: float | Real = 0.5,
        anneal_updates: int = 1000,
        warmup_updates: int = 0,
        update_every: int = 1,
    ) -> None:
        if not isinstance(decay, Real) or not 0 < float(decay) < 1:
            raise ValueError(f"decay must lie between 0 and 1, not be {brief(decay)}")
        at_least(0, anneal_updates=anneal_updates, warmup_updates=warmup_updates)
        at_least(1, update_every=update_every)
        super().__init__(
            name="pipemare",
            lists=one_f_one_b,
            synchronous=False,
            update_every=update_every,
            stash=False,
            decay=float(decay),
            anneal_updates=anneal_updates,
            warmup_updates=warmup_updates,
        )
