"""Pipelines without a flush: the order of 1F1B over a stream that does not end with the step.

    F<m>, B<m>: forward and backward of micro-batch m; an update follows each B. S = 3, a stream of 5:

    stage 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
    stage 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

PipeDream stashes the version that each micro-batch in flight read: S - s on stage s; with vertical sync every stage
holds S. PipeDream-2BW updates once per M micro-batches and holds two versions.
"""

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule

PIPEDREAM = Schedule("pipedream", one_f_one_b, synchronous=False, versions=lambda s, stages: stages - s)
PIPEDREAM_VERTICAL = Schedule(
    "pipedream-vertical-sync", one_f_one_b, synchronous=False, versions=lambda s, stages: stages
)
TWO_BW = Schedule("2bw", one_f_one_b, synchronous=False, versions=lambda s, stages: 2)
