"""Pipelines without a flush: the order of 1F1B over a stream that does not end with the step.

    F<m>, B<m>: forward and backward of micro-batch m; an update follows each B. S = 3, a stream of 5:

    stage 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
    stage 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

PipeDream (SOSP 2019) stashes the version that each micro-batch in flight read: F<m> on stage s of S
reads version max(0, m - (S - 1 - s)), its backward the same; S - s versions live. With vertical
sync all stages read the version that stage 0 read, max(0, m - (S - 1)), and hold S.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least
from jvpipe.util.given import checked_flag


def _in_flight(stage: int, stages: int) -> int:
    return stages - stage


def _at_every_stage(stage: int, stages: int) -> int:
    return stages


class PipeDream(Schedule):
    """PipeDream, an update every `update_every` micro-batches.

    >>> PipeDream(vertical_sync=True).name
    'pipedream-vertical-sync'
    """

    def __init__(self, *, vertical_sync: bool = False, update_every: int = 1) -> None:
        checked_flag("vertical_sync", vertical_sync)
        at_least(1, update_every=update_every)
        super().__init__(
            name="pipedream-vertical-sync" if vertical_sync else "pipedream",
            lists=one_f_one_b,
            synchronous=False,
            versions=_at_every_stage if vertical_sync else _in_flight,
            update_every=update_every,
            rule="first stage" if vertical_sync else "newest",
        )
