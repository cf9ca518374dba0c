"""PipeMare (MLSys 2021): one version.

The backward finds newer weights than its forward read, and corrects for it. In the order of
PipeDream, F<m> on stage s of S reads version max(0, m - tau) and B<m> version m, tau = S - 1 - s.
(The paper's tau, 2 (S - s) + 1 over N, belongs to its own pipeline, in which the updates are
further away.)

    T1  an update, the t-th, is scaled by max(1, tau) ** -(1 - min(t / K, 1)); K: `anneal_updates`
    T2  B reads w - tau delta, where delta <- gamma delta + (1 - gamma) (w[t + 1] - w[t]), gamma = D ** (1 / tau);
        D: `decay`; off at tau = 0
    T3  the first `warmup_updates` are synchronous, under 1F1B, one per step

Whatever is recomputed for a backward reads the backward's weights: here fates are part of the
mathematics. A parameter that several stages read follows its first reader in all of them, and is
stashed instead.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least
from jvpipe.util.brief import brief


def _and_correction(stage: int, stages: int) -> int:
    return 1 + (stage < stages - 1)  # delta; there is none on the last stage, where tau = 0


class PipeMare(Schedule):
    """PipeMare with its three techniques.

    >>> PipeMare(decay=0.5, warmup_updates=100).decay
    0.5
    """

    def __init__(
        self,
        *,
        decay: float = 0.5,
        anneal_updates: int = 1000,
        warmup_updates: int = 0,
        update_every: int = 1,
    ) -> None:
        if not isinstance(decay, int | float) or not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, not be {brief(decay)}")
        at_least(0, anneal_updates=anneal_updates, warmup_updates=warmup_updates)
        at_least(1, update_every=update_every)
        super().__init__(
            name="pipemare",
            lists=one_f_one_b,
            synchronous=False,
            versions=_and_correction,
            update_every=update_every,
            stash=False,
            decay=decay,
            anneal_updates=anneal_updates,
            warmup_updates=warmup_updates,
        )
