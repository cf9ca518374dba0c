"""PipeDream (SOSP 2019): the order of 1F1B over a stream, which has no flush between its steps.

F<m> and B<m> are the forward and the backward of micro-batch m. An update follows each B, and takes
no time in the drawing. A column is one unit of time. With S = 3 stages and 5 micro-batches:

    stage 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
    stage 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Version n of a stage's weights is the version after n updates. PipeDream keeps (stashes) the version
that each micro-batch in flight has read. On stage s of S, F<m> and B<m> both read the version
max(0, m - (S - 1 - s)), so the stage holds S - s versions. With vertical sync all stages read the
version that stage 0 has read, max(0, m - (S - 1)), so each stage holds S versions.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, at_least
from jvpipe.util.given import checked_flag


class PipeDream(Schedule):
    """The schedule of PipeDream, with an update every `update_every` micro-batches.

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
            update_every=update_every,
            rule="first stage" if vertical_sync else "newest",
        )
