"""In which order: one file per family of schedules, the passes that lower them, and their registry."""

from collections.abc import Callable

from jvpipe.ir.names import did_you_mean
from jvpipe.ir.task import TaskLists
from jvpipe.schedules.gpipe import gpipe
from jvpipe.schedules.one_f_one_b import one_f_one_b

Schedule = Callable[[int, int], TaskLists]
SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def find_schedule(name: str) -> Schedule:
    """The schedule of that name: `(stages, microbatches) -> task lists`."""
    if name not in SCHEDULES:
        raise ValueError(did_you_mean("schedule", name, list(SCHEDULES)))
    return SCHEDULES[name]
