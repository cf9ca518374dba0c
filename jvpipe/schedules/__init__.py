"""In which order: one file per family of schedules, the passes that lower them, and their registry."""

from jvpipe.ir.names import did_you_mean
from jvpipe.schedules.gpipe import GPIPE
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.pipedream import PIPEDREAM, PIPEDREAM_VERTICAL, TWO_BW
from jvpipe.schedules.schedule import Schedule

SCHEDULES = {s.name: s for s in (GPIPE, ONE_F_ONE_B, PIPEDREAM, PIPEDREAM_VERTICAL, TWO_BW)}


def find_schedule(name: str) -> Schedule:
    """The schedule of that name."""
    if name not in SCHEDULES:
        raise ValueError(did_you_mean("schedule", name, list(SCHEDULES)))
    return SCHEDULES[name]
