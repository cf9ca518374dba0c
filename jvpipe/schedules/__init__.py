"""Schedules: the order of tasks on each device; one file per family, and the registry of names.

To add a schedule, write a file and add an entry to `_USUAL` (docs/adding_a_schedule.md).
"""

from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.gpipe import GPIPE
from jvpipe.schedules.interleaved import ZBH1, Interleaved
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.pipedream import PipeDream
from jvpipe.schedules.pipemare import PipeMare
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.two_bw import TwoBW
from jvpipe.schedules.vee import VSchedule
from jvpipe.schedules.xpipe import XPipe
from jvpipe.util.names import did_you_mean

_USUAL = (
    # synchronous
    GPIPE,
    ONE_F_ONE_B,
    Interleaved(),
    ZBH1(),
    VSchedule(),
    VSchedule(memory="half"),
    AUTO,
    # asynchronous
    PipeDream(),
    PipeDream(vertical_sync=True),
    TwoBW(),
    PipeMare(),
    XPipe(),
)
SCHEDULES = {schedule.name: schedule for schedule in _USUAL}


def find_schedule(name: str | Schedule) -> Schedule:
    """Returns the schedule of a given name, with default options; a `Schedule` is returned as is.

    Raises:
        ValueError: there is no schedule with this name.
    """
    if isinstance(name, Schedule):
        return name
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(did_you_mean("schedule", name, list(SCHEDULES)))
    return SCHEDULES[name]
