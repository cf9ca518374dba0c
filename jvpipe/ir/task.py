"""Tasks: the actions of stages on micro-batches that a schedule puts in order.

Tasks are written as text, and task lists as CSV, in the formats of torch.distributed.pipelining.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jvpipe.ir.kinds import Kind
from jvpipe.util.brief import brief

_TEXT = re.compile(r"([0-9]+)([A-Z]+)([0-9]+)")
_KINDS = {str(kind): kind for kind in Kind}
_OF_TORCH = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds of tasks that torch also has, under the same letters."""


class Task(NamedTuple):
    """One action of one stage on one micro-batch.

    Saved files depend on its text form: stage, kind and micro-batch, as torch writes them.

    >>> str(Task(2, Kind.F, 0)), Task.parse("1B3") == Task(1, Kind.B, 3)
    ('2F0', True)
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Task":
        """Reads the text form of a task."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in _KINDS:
            raise ValueError(
                f"'{text}' is not a task: write stage, kind and micro-batch, such as 2F0"
            )
        return Task(int(match[1]), _KINDS[match[2]], int(match[3]))


TaskLists = tuple[tuple[Task, ...], ...]
"""For each device (or stage), its tasks in the order in which they run."""


def write_csv(path: str | Path, lists: TaskLists | Sequence[str]) -> None:
    """Writes task lists as a CSV file that torch can read, in its format `compute_only`.

    The file has a line for each device.

    Args:
        path: the path of the file.
        lists: the tasks of each device, or for each device one text, as in `Plan.tasks`.

    Raises:
        ValueError: there are no lists, a text is not a task, or torch has no such kind of task.
    """
    if not lists or isinstance(lists, str):
        raise ValueError(
            f"{brief(lists)} has no task lists: give plan.tasks or, if the plan has none, the "
            "lists of a schedule, such as "
            "jvpipe.schedules.find_schedule('1f1b').tasks(devices, microbatches)"
        )
    rows = []
    for tasks in lists:
        texts = tasks.split() if isinstance(tasks, str) else map(str, tasks)
        rows.append([_for_torch(text) for text in texts])
    # All tasks are checked before the file is opened, so a refused list leaves an old file whole.
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def _for_torch(text: str) -> str:
    """Returns the text of a task; raises ValueError if torch has no such kind of task."""
    task = Task.parse(text)
    if task.kind not in _OF_TORCH:
        kinds = ", ".join(_OF_TORCH)
        raise ValueError(
            f"{task} cannot be written: torch reads only {kinds}, and adds other tasks itself"
        )
    return str(task)


def text(tasks: Sequence[Task]) -> str:
    """Returns the tasks as one line of text.

    >>> text([Task(0, Kind.F, 0), Task(0, Kind.B, 0)])
    '0F0 0B0'
    """
    return " ".join(map(str, tasks))


def cannot_progress(missing: Mapping[Any, Iterable[Any]]) -> ValueError:
    """Makes the error for a schedule whose tasks wait for each other.

    Args:
        missing: for each task that cannot start, the tasks that it waits for.

    >>> print(cannot_progress({"0B0": ["1B0"], "1B0": ["1F0"]}))
    the schedule cannot progress: 0B0 waits for 1B0; 1B0 waits for 1F0
    """
    reasons = []
    for task, others in missing.items():
        waited_for = " ".join(map(str, others))
        reasons.append(f"{task} waits for {waited_for}")
    return ValueError(f"the schedule cannot progress: {'; '.join(reasons)}")
